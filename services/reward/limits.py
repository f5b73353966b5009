"""What the kernel enforces on a grader process: it dies with the service; its memory and processor time have bounds."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_CPU_GRACE_SECONDS = 5


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the service `parent` (its pid) ends, however it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the reward service ended before its worker started")


def address_space_bytes() -> int:
    """Address space that this process uses now; 0 where the system does not tell."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except OSError:
        return 0
    return int(pages) * resource.getpagesize()


def limit_memory(extra_bytes: int) -> int:
    """Refuse address space beyond what is used now plus `extra_bytes`. Returns what is used now."""
    used = address_space_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = used + extra_bytes
    if used and (hard == resource.RLIM_INFINITY or wanted <= hard):
        resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    return used


def limit_processor(seconds: float) -> None:
    """End this process when it computes far longer than a task may take: for a service too frozen to kill it."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    allowed = (seconds + _CPU_GRACE_SECONDS) * (os.cpu_count() or 1)
    wanted = int(usage.ru_utime + usage.ru_stime + allowed) + 1
    if hard == resource.RLIM_INFINITY or wanted <= hard:
        resource.setrlimit(resource.RLIMIT_CPU, (wanted, hard))
