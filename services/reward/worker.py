"""A grader process: loads graders once, then grades one task at a time, which the pool sends it through a pipe."""

from __future__ import annotations

import argparse
import math
import numbers
import os
import time
from typing import Any, BinaryIO

from paceline.rpc.parent import die_with_parent
from services.reward import frames, limits
from services.reward.graders.base import GradeItem
from services.reward.loading import GraderRefused, LoadedGrader, describe, load


class Worker:
    """The loaded graders of this process and what it may still use."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._used_at_start: int | None = None
        self._graders: dict[str, LoadedGrader] = {}

    def answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """The reply to one message. Memory is bounded from the first one on, which loads the run's graders."""
        reply = self._load(message) if message["do"] == "load" else self._grade(message)
        if self._used_at_start is None:
            self._used_at_start = limits.limit_memory(self._memory_bytes)
        # A leak must not make a later, innocent sample fail.
        if limits.address_space_bytes() - self._used_at_start > self._memory_bytes / 2:
            reply["retire"] = True
        return reply

    def _load(self, message: dict[str, Any]) -> dict[str, Any]:
        loaded = []
        for grader in message["graders"]:
            try:
                item = self._grader(grader)
            except GraderRefused as error:
                return {"refused": str(error)}
            loaded.append({"name": item.name, "required_metadata": list(item.grader.required_metadata())})
        return {"loaded": loaded}

    def _grader(self, grader: dict[str, Any]) -> LoadedGrader:
        key = grader["key"]
        if key not in self._graders:
            self._graders[key] = load(grader["name"], grader["options"], grader["where"])
        return self._graders[key]

    def _grade(self, message: dict[str, Any]) -> dict[str, Any]:
        limits.limit_processor(message["limit"])
        source_file = ""
        began = time.perf_counter()
        try:
            loaded = self._grader(message["grader"])
            source_file = loaded.source_file
            began = time.perf_counter()
            reply = _verdict(loaded.grader.grade(GradeItem(**message["item"])))
        except MemoryError as error:
            limit = f"the limit is {self._memory_bytes >> 20} MiB beyond the start (reward.memory_mb)"
            reply = {"missing": "GRADER_ERROR", "detail": f"{describe(error, source_file)}; {limit}", "retire": True}
        except BaseException as error:  # noqa: BLE001 - foreign code may raise anything; all of it is the verdict
            reply = {"missing": "GRADER_ERROR", "detail": describe(error, source_file)}
        return {"seconds": time.perf_counter() - began, **reply}


def _verdict(value: Any) -> dict[str, Any]:
    if value is None:
        return {"missing": "NOT_GRADED", "detail": "the grader returned None"}
    if not isinstance(value, numbers.Real):
        return {"missing": "INVALID", "detail": f"the grader returned {value!r:.60}, a {type(value).__name__}"}
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return {"missing": "INVALID", "detail": f"the grader returned {number}, which is not a finite number"}
    return {"value": number}


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The two pipes to the pool, out of reach of graders: what they print goes to stderr, what they read is empty."""
    tasks, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return tasks, replies


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.reward.worker", description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="pid of the service")
    parser.add_argument("--memory-mb", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    tasks, replies = _take_pipes()
    worker = Worker(arguments.memory_mb << 20)
    pid = os.getpid()
    while (message := frames.read(tasks)) is not None:
        reply = worker.answer(message)
        if os.getpid() != pid:
            # A grader forked and its child came back here; only the parent may answer.
            os._exit(0)
        replies.write(frames.encode(reply))
        replies.flush()
    # Not an ordinary exit: a thread that a grader left behind must not hold the process up.
    os._exit(0)


if __name__ == "__main__":
    main()
