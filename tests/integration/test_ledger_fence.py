"""Two trainers on one run: a frozen one that comes back after another took over changes nothing."""

from __future__ import annotations

import pytest
import redis.asyncio

from paceline.ledger import Ledger
from paceline.rpc import errors
from paceline.stream import Claim, SampleStream
from paceline.testing.groups import make_group


class Run:
    """A run with buffered groups, and one stream a trainer."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.client = client
        self.ledger = Ledger(client, "r")
        self.rollout = SampleStream(client, "r", capacity=8)

    async def produce(self, count: int) -> None:
        for item in await self.ledger.issue("rollout-0", count, 1000.0, None):
            assert await self.rollout.put(make_group("r", item.group_id, item.attempt, 1)) == "accepted"

    def trainer(self, fence: int, incarnation: str) -> SampleStream:
        stream = SampleStream(self.client, "r", capacity=8)
        stream.hold(fence, incarnation)
        return stream


@pytest.fixture
async def run(redis_client: redis.asyncio.Redis) -> Run:
    run = Run(redis_client)
    await run.ledger.initialise(8, 1)
    await run.produce(6)
    return run


async def claimed(stream: SampleStream, step: int) -> list[str]:
    claim = await stream.claim("trainer-0", step, 2, 1, 0)
    assert isinstance(claim, Claim)
    return [group.group_id for group in claim.groups]


async def test_a_trainer_that_was_replaced_is_refused_in_everything(run: Run) -> None:
    frozen, fresh = run.trainer(1700000000001, "life-a"), run.trainer(1700000000002, "life-b")
    first = await claimed(frozen, 1)
    await frozen.mark_trained(1)
    assert await claimed(frozen, 2)

    # `frozen` stops here; its place is taken. It comes back in the middle of its step.
    assert await fresh.rewind(0) == [1, 2]
    before = await run.ledger.account(recount=True)
    both = r"trainer life-a \(fence 1700000000001\) of run r was replaced by trainer life-b \(fence 1700000000002\)"
    for call in (
        lambda: frozen.mark_trained(2),
        lambda: frozen.commit(1),
        lambda: frozen.claim("trainer-0", 1, 2, 1, 0),
        lambda: frozen.claim("trainer-0", 3, 2, 1, 0),
        lambda: frozen.rewind(0),
        lambda: frozen.rewind(0, reissue_committed=True),
    ):
        with pytest.raises(errors.FailedPrecondition, match=both):
            await call()
    assert await run.ledger.account(recount=True) == before

    assert await claimed(fresh, 1) == first
    await fresh.mark_trained(1)
    assert await fresh.commit(1) == 1
    # Rollout needs no fence, and is not in the way of one.
    await run.produce(2)
    assert (await run.ledger.account(recount=True)).imbalances == []


async def test_a_trainer_without_a_fence_is_refused_once_one_was_seen(run: Run) -> None:
    await claimed(run.rollout, 1)
    await run.trainer(3, "life-a").mark_trained(1)
    with pytest.raises(errors.FailedPrecondition, match=r"without a fence of run r .* trainer life-a \(fence 3\)"):
        await run.rollout.commit(1)


async def test_a_ghost_cannot_bring_back_its_snapshot(run: Run) -> None:
    frozen, fresh = run.trainer(1, "life-a"), run.trainer(2, "life-b")
    ghost = Ledger(run.client, "r")
    ghost.hold(1, "life-a")
    await claimed(frozen, 1)
    snapshot = await ghost.snapshot()
    await fresh.rewind(0)
    snapshot["sequence"] += 1000  # as if its history were the longer one
    with pytest.raises(errors.FailedPrecondition, match=r"life-a .* replaced by trainer life-b"):
        await ghost.restore(snapshot)


async def test_a_restore_keeps_the_fence(run: Run) -> None:
    ledger = Ledger(run.client, "r")
    ledger.hold(2, "life-b")
    snapshot = await ledger.snapshot()
    await run.client.flushall()
    assert await ledger.restore(snapshot)
    with pytest.raises(errors.FailedPrecondition, match="replaced by trainer life-b"):
        await run.trainer(1, "life-a").rewind(0)


@pytest.mark.parametrize(("fence", "incarnation"), [(0, "life"), (1, ""), (1, "two words")])
def test_a_fence_is_a_number_and_one_word(fence: int, incarnation: str) -> None:
    with pytest.raises(ValueError, match=f"fence {fence}"):
        SampleStream(redis.asyncio.Redis(), "r", 1).hold(fence, incarnation)
