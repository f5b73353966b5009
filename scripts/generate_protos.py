"""Generate src/paceline/api from protos/; with --check, fail when the committed stubs are not fresh."""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
TARGET = ROOT / "src" / "paceline" / "api"


def generate(out: Path) -> None:
    """Write stubs and package markers for every proto under `out`."""
    files = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    include = Path(grpc_tools.__file__).parent / "_proto"
    flags = [f"-I{PROTOS}", f"-I{include}"]
    for plugin in ("python", "grpc_python", "mypy", "mypy_grpc"):
        flags.append(f"--{plugin}_out={out}")
    if protoc.main(["protoc", *flags, *files]) != 0:
        raise SystemExit("protoc failed; its message is above")
    api = out / "paceline" / "api"
    for folder in [api, *(path for path in api.rglob("*") if path.is_dir())]:
        (folder / "__init__.py").touch()


def differences(left: Path, right: Path) -> list[str]:
    """Relative paths that differ between two trees or are in one only."""
    compared = filecmp.dircmp(left, right, ignore=["__pycache__"])
    found = [*compared.left_only, *compared.right_only, *compared.diff_files]
    for name in compared.common_dirs:
        found += [f"{name}/{item}" for item in differences(left / name, right / name)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = Path(scratch) / "paceline" / "api"
        if check:
            stale = differences(fresh, TARGET)
            if stale:
                print(f"stubs are stale ({', '.join(sorted(stale)[:5])}); run `make protos`")
            return 1 if stale else 0
        shutil.rmtree(TARGET, ignore_errors=True)
        shutil.copytree(fresh, TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
