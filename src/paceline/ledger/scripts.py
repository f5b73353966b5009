"""Runs the Lua scripts of the ledger: each operation is one script call, so it happens whole or not at all."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from functools import cache
from importlib import resources
from typing import Any, cast

import redis.asyncio
import redis.exceptions
from redis.commands.core import AsyncScript

from paceline.ledger import keys
from paceline.rpc import errors

_SOURCE_SUFFIX = re.compile(r" script: (?:[0-9a-f]{40}, )?on @.*$", re.DOTALL)
_RAISED = {
    "FAILED_PRECONDITION": errors.FailedPrecondition,
    "DATA_LOSS": errors.DataLoss,
    "INTERNAL": errors.PacelineError,
}


_SHARED = {
    "issue": ("blank",), "restore": ("blank",), "claim": ("claims",), "mark_trained": ("claims",),
    "commit": ("claims",), "rewind": ("claims",),
}  # fmt: skip


@cache
def source(name: str) -> str:
    """Text of a script, after the names of the keys and the parts that it shares with others."""
    folder = resources.files("paceline.ledger") / "lua"
    texts = [(folder / f"{part}.lua").read_text() for part in ("prelude", *_SHARED.get(name, ()), name)]
    return "\n".join([keys.lua_names(), *texts])


def translate(error: redis.exceptions.RedisError) -> Exception:
    """The PacelineError that a script or the connection meant; the error itself when its meaning is not known."""
    if isinstance(error, redis.exceptions.ResponseError):
        code, _, text = _SOURCE_SUFFIX.sub("", str(error)).partition(" ")
        if code in _RAISED:
            return _RAISED[code](text)
        if code == "OOM" or " OOM " in str(error):
            error = redis.exceptions.OutOfMemoryError(str(error))
    return errors.translate(error) or error


class ScriptRunner:
    """Scripts over the keys of one run. Remembers which ledger it has seen, so that a replaced one is noticed."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str) -> None:
        if client.get_encoder().decode_responses:
            raise ValueError("the ledger needs a Redis client with decode_responses=False: payloads are bytes")
        self.run_id = run_id
        self.client = client
        self._keys = [keys.prefix(run_id)]
        self._ledger_id = ""
        self._scripts: dict[str, AsyncScript] = {}

    async def attach(self) -> str:
        """Accept the ledger that is there now and return its id; FailedPrecondition when there is none."""
        self._ledger_id = ""
        name = await self.command(self.client.hget(keys.key(self.run_id, "meta"), "ledger_id"))
        if name is None:
            await self.run_unattached("account", 0)
            return await self.attach()
        self._ledger_id = name.decode()
        return self._ledger_id

    async def run(self, name: str, *values: str | bytes | int | float) -> Any:
        """Run a script that needs the ledger. Raises the PacelineError that the script means."""
        if not self._ledger_id:
            await self.attach()
        return await self.run_unattached(name, *values)

    async def run_unattached(self, name: str, *values: str | bytes | int | float) -> Any:
        """Run a script that may create or replace the ledger."""
        script = self._scripts.get(name)
        if script is None:
            script = self._scripts[name] = self.client.register_script(source(name))
        return await self.command(script(self._keys, [f"{self.run_id} {self._ledger_id}", *values]))

    async def command(self, reply: Any) -> Any:
        """Await a reply of Redis; its errors become PacelineErrors."""
        try:
            return await cast(Awaitable[Any], reply)
        except redis.exceptions.RedisError as error:
            meant = translate(error)
            if meant is error:
                raise
            raise meant from error
