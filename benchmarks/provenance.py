"""What every benchmark writes beside its figures: on which machine and at which commit they were taken."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def hardware() -> dict[str, Any]:
    """Processor, cores and load of this machine now."""
    cpu, info = platform.processor(), Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), cpu)
    return {
        "cpu": cpu, "cores": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg(),
        "python": platform.python_version(),
    }  # fmt: skip


def commit() -> str:
    """The checked-out commit, or empty outside a repository."""
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip()
