"""The tie between a process and the one that started it: no orphan, even when that is killed with SIGKILL."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however it dies; exit when it is dead already.

    Off Linux the kernel cannot be asked, and only a parent that is dead already is noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(f"parent process {parent_pid} died before the start")
