"""What the kernel enforces on a grader process: its memory and its processor time have bounds."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_CPU_GRACE_SECONDS = 5


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
