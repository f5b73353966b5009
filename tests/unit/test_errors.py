"""What Redis says is understood the same way alone and inside a pipeline, where the client puts words before it."""

from __future__ import annotations

import pytest
import redis.exceptions

from paceline.rpc import errors

FULL_DISK = "MISCONF Errors writing to the AOF file: No space left on device"


@pytest.mark.parametrize("text", [FULL_DISK, f"Command # 1 (HSET x y z) of pipeline caused error: {FULL_DISK}"])
def test_a_full_disk_is_waited_out(text: str) -> None:
    known = errors.translate(redis.exceptions.ResponseError(text))
    assert isinstance(known, errors.Unavailable)
    assert known.retryable
    assert "disk full" in known.message


def test_an_unknown_answer_stays_what_it_is() -> None:
    assert errors.translate(redis.exceptions.ResponseError("ERR wrong number of arguments")) is None
