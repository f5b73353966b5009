"""Fail when a proto breaks the wire or its JSON against the newest release; before one nothing can."""

from __future__ import annotations

import subprocess
import sys


def main() -> int:
    described = subprocess.run(
        ["git", "describe", "--tags", "--abbrev=0", "--match", "v*"], capture_output=True, text=True, check=False
    )
    if described.returncode != 0:
        return 0
    tag = described.stdout.strip()
    return subprocess.run(
        ["buf", "breaking", "protos", "--against", f".git#tag={tag},subdir=protos"], check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
