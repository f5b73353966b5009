"""Runs the ledger's operations: each is one call of a Lua function in Redis, so it happens whole or not at all.

They are functions, not EVAL scripts, because a script would build the shared part anew in every call.
"""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

import redis.asyncio
import redis.exceptions

from paceline.cancellation import cancellable, noticing
from paceline.ledger import keys
from paceline.rpc import errors

_SOURCE_SUFFIX = re.compile(r" script: (?:\w+, )?on @.*$", re.DOTALL)
_RAISED = {
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "DATA_LOSS": errors.DataLoss,
    "INTERNAL": errors.PacelineError,
}


_SHARED = ("prelude", "records", "claims")
OPERATIONS = (
    "initialise", "issue", "renew", "reclaim", "drop", "fail", "account", "snapshot", "restore",
    "put", "claim", "mark_trained", "commit", "rewind", "live_attempts",
)  # fmt: skip


@cache
def library() -> tuple[str, str]:
    """Name and Lua text of the library. The name holds a digest of the text, so releases can share one Redis."""
    folder = resources.files("paceline.ledger") / "lua"
    shared = "\n".join((folder / f"{part}.lua").read_text() for part in _SHARED)
    bodies = {name: (folder / f"{name}.lua").read_text() for name in OPERATIONS}
    name = (
        "paceline_" + hashlib.sha256((keys.lua_names() + shared + "".join(bodies.values())).encode()).hexdigest()[:12]
    )
    functions = "\n".join(
        f"redis.register_function('{name}_{operation}', function(keys, arguments)\nbegin(keys, arguments)\n{body}end)"
        for operation, body in bodies.items()
    )
    return name, f"#!lua name={name}\n{keys.lua_names()}\n{shared}\n{functions}\n"


@cache
def _functions() -> dict[str, bytes]:
    """The name of each operation in Redis."""
    name, _ = library()
    return {operation: f"{name}_{operation}".encode() for operation in OPERATIONS}


def _meant(error: redis.exceptions.RedisError) -> Exception:
    """The PacelineError that an operation or the connection meant."""
    if isinstance(error, redis.exceptions.ResponseError):
        code, _, text = _SOURCE_SUFFIX.sub("", str(error)).partition(" ")
        if code in _RAISED:
            return _RAISED[code](text)
        if "OOM " in str(error):
            error = redis.exceptions.OutOfMemoryError(str(error))
    return errors.translate(error) or errors.PacelineError(f"Redis refused an operation of the ledger: {error}")


class ScriptRunner:
    """Operations on the keys of one run. Remembers which ledger it has seen, so that a replaced one is noticed."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str) -> None:
        if client.get_encoder().decode_responses:
            raise ValueError("the ledger needs a Redis client with decode_responses=False: payloads are bytes")
        self.run_id = run_id
        self.client = client
        self._prefix = keys.prefix(run_id).encode()
        self._trainer = "0 "
        self._remember("")

    async def attach(self) -> str:
        """Accept the ledger that is there now and return its id; FailedPrecondition when there is none."""
        self._remember("")
        name = await self.command(self.client.hget(keys.key(self.run_id, "meta"), "ledger_id"))
        if name is None:
            await self.run_unattached("account", 0)
            return await self.attach()
        self._remember(name.decode())
        return self._ledger_id

    def hold(self, fence: int, incarnation: str) -> None:
        """From now on the operations are those of this trainer."""
        if fence < 1 or not incarnation or any(character.isspace() for character in incarnation):
            raise ValueError(f"fence {fence} of trainer {incarnation!r}: a number from 1 on and one word are needed")
        self._trainer = f"{fence} {incarnation}"
        self._remember(self._ledger_id)

    def _remember(self, ledger_id: str) -> None:
        self._ledger_id = ledger_id
        self._identity = f"{self.run_id} {ledger_id} {self._trainer}".encode()

    async def run(self, operation: str, *values: str | bytes | int | float) -> Any:
        """Run an operation that needs the ledger. Raises the PacelineError that the operation means."""
        if not self._ledger_id:
            await self.attach()
        return await self.run_unattached(operation, *values)

    async def run_unattached(self, operation: str, *values: str | bytes | int | float) -> Any:
        """Run an operation that may create or replace the ledger."""
        command = (b"FCALL", _functions()[operation], b"1", self._prefix, self._identity, *values)
        try:
            return await noticing(self.client.execute_command(*command))
        except redis.exceptions.RedisError as error:
            if "Function not found" not in str(error):
                raise _meant(error) from error
        await self.command(self.client.function_load(library()[1], replace=True))
        return await self.command(self.client.execute_command(*command))

    async def command(self, reply: Any) -> Any:
        """Await a reply of Redis; its errors become PacelineErrors."""
        try:
            return await cancellable(reply)
        except redis.exceptions.RedisError as error:
            raise _meant(error) from error
