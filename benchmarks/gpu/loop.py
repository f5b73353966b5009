"""The whole loop on one CUDA device: every service, engine and trainer on the GPU, sort4 learning.

Run: python benchmarks/gpu/loop.py [OUT]. Writes gpu_loop.json into OUT (default benchmarks/results). Needs no download:
the model is tests/assets/sort4.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
RUNS = {"float32": [], "bfloat16": ["engine.dtype=bfloat16", "trainer.dtype=bfloat16"]}


def train(dtype: str, overrides: list[str], scratch: Path) -> dict[str, Any]:
    """Run sort4 on the GPU; its summary, or the end of the logs when it fails."""
    directory = scratch / dtype
    command = [sys.executable, "-m", "paceline.cli.main", "run", "examples/sort4/run.toml", "run.steps=30"]
    command += [f"run.directory={directory}", "engine.device=cuda", "trainer.device=cuda", *overrides]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=400)
    if done.returncode != 0:
        logs = {path.stem: path.read_text()[-1500:] for path in (directory / "logs").glob("*-0.log")}
        return {"failed": done.returncode, "output": done.stdout[-2000:] + done.stderr[-2000:], "logs": logs}
    return json.loads((directory / "summary.json").read_text())


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "benchmarks" / "results"
    result: dict[str, Any] = {
        "command": "python benchmarks/gpu/loop.py",
        "hardware": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "setting": "sort4, 30 steps of 32 prompts x 16 samples, full parameters, max_staleness 0",
    }
    with tempfile.TemporaryDirectory() as scratch:
        for dtype, overrides in RUNS.items():
            result[dtype] = train(dtype, overrides, Path(scratch))
            print(json.dumps({dtype: result[dtype]}, indent=1), flush=True)
    (out / "gpu_loop.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
