"""Put, claim, staleness, commit and rewind, against a real Valkey."""

from __future__ import annotations

import numpy as np
import pytest
import redis.asyncio

from paceline.ledger import Ledger
from paceline.ledger.keys import key
from paceline.rpc import errors
from paceline.stream import Claim, NotReady, SampleStream
from paceline.testing.groups import make_group

LEASE = 1000.0


@pytest.fixture
async def ledger(redis_client: redis.asyncio.Redis) -> Ledger:
    item = Ledger(redis_client, "r")
    await item.initialise(dataset_size=8, epochs=1)
    return item


@pytest.fixture
def stream(redis_client: redis.asyncio.Redis) -> SampleStream:
    return SampleStream(redis_client, "r", capacity=8)


async def produce(ledger: Ledger, stream: SampleStream, *versions: int) -> list[str]:
    """Issue and put one group a version."""
    issued = await ledger.issue("a", len(versions), LEASE, None)
    for item, version in zip(issued, versions, strict=True):
        assert await stream.put(make_group("r", item.group_id, item.attempt, version)) == "accepted"
    return [item.group_id for item in issued]


def ids(claim: Claim | NotReady) -> list[str]:
    assert isinstance(claim, Claim), claim
    return [group.group_id for group in claim.groups]


async def test_what_is_claimed_is_what_was_put(ledger: Ledger, stream: SampleStream) -> None:
    await ledger.issue("a", 1, LEASE, None)
    group = make_group("r", "e0.0", num_samples=3, num_tokens=700)
    group.traceparent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    await stream.put(group)
    claim = await stream.claim("t", 1, 1, 1, 0)
    assert isinstance(claim, Claim)
    assert claim.groups[0].to_wire() == group.to_wire()
    assert np.array_equal(claim.groups[0].samples[2].sampler_logprobs, group.samples[2].sampler_logprobs)


async def test_the_entry_in_redis_carries_the_trace(
    ledger: Ledger, stream: SampleStream, redis_client: redis.asyncio.Redis
) -> None:
    await produce(ledger, stream, 3)
    [[_, fields]] = await redis_client.xrange(key("r", "samples"))
    assert (fields[b"group_id"], fields[b"oldest_version"], fields[b"traceparent"]) == (b"e0.0", b"3", b"")


async def test_putting_twice_is_harmless_in_every_later_state(ledger: Ledger, stream: SampleStream) -> None:
    await produce(ledger, stream, 1)
    group = make_group("r", "e0.0")
    assert await stream.put(group) == "duplicate"
    await stream.claim("t", 1, 1, 1, 0)
    assert await stream.put(group) == "duplicate"
    await stream.mark_trained(1)
    await stream.commit(1)
    assert await stream.put(group) == "duplicate"
    assert (await ledger.account(recount=True)).committed == 1


async def test_a_duplicate_is_told_so_even_when_the_buffer_is_full(
    ledger: Ledger, redis_client: redis.asyncio.Redis
) -> None:
    small = SampleStream(redis_client, "r", capacity=1)
    await produce(ledger, small, 1)
    assert await small.put(make_group("r", "e0.0")) == "duplicate"
    await ledger.issue("a", 1, LEASE, None)
    with pytest.raises(errors.ResourceExhausted, match="1 of 1 groups wait"):
        await small.put(make_group("r", "e0.1"))


async def test_a_claim_takes_all_or_nothing(ledger: Ledger, stream: SampleStream) -> None:
    await produce(ledger, stream, 1, 1)
    assert await stream.claim("t", 1, 3, 1, 0) == NotReady(have=2, want=3)
    await produce(ledger, stream, 1, 1)
    assert ids(await stream.claim("t", 1, 3, 1, 0)) == ["e0.0", "e0.1", "e0.2"]
    assert await stream.claim("t", 2, 3, 1, 0) == NotReady(have=1, want=3)


async def test_a_recorded_claim_is_replayed_to_any_consumer(ledger: Ledger, stream: SampleStream) -> None:
    await produce(ledger, stream, 1, 1, 1)
    first = ids(await stream.claim("t", 1, 2, 1, None))
    again = await stream.claim("t-restarted", 1, 3, 7, 0)
    assert ids(again) == first
    assert isinstance(again, Claim) and again.replayed and again.trainer_version == 1


async def test_stale_groups_are_reissued_and_counted(ledger: Ledger, stream: SampleStream) -> None:
    await produce(ledger, stream, 1, 3, 2)
    assert await stream.claim("t", 1, 2, 3, max_staleness=0) == NotReady(have=1, want=2)
    assert [item.group_id for item in await ledger.groups("waiting")] == ["e0.0", "e0.2"]
    await produce(ledger, stream, 3, 3)
    claim = await stream.claim("t", 1, 2, 3, max_staleness=0)
    assert isinstance(claim, Claim)
    assert ids(claim) == ["e0.1", "e0.0"]
    assert claim.refused == 2
    account = await ledger.account(recount=True)
    assert (account.refused_stale, account.dropped, account.imbalances) == (2, {}, [])
    [group] = [item for item in await ledger.groups("claimed") if item.group_id == "e0.0"]
    assert (group.attempt, group.failures, group.refusals) == (2, 0, 1)


async def test_stale_groups_are_dropped_when_told_so(ledger: Ledger, stream: SampleStream) -> None:
    await produce(ledger, stream, 1, 2, 3)
    claim = await stream.claim("t", 1, 2, 4, max_staleness=2, too_stale="drop")
    assert ids(claim) == ["e0.1", "e0.2"]
    assert (await ledger.account(recount=True)).dropped == {"stale": 1}


async def test_a_group_may_be_refused_a_limited_number_of_times(ledger: Ledger, stream: SampleStream) -> None:
    for version in (2, 3):
        await ledger.issue("a", 1, LEASE, ceiling=1)
        [group] = await ledger.groups("generating")
        await stream.put(make_group("r", group.group_id, group.attempt, version - 1))
        await stream.claim("t", 1, 1, version, 0, "reissue", max_attempts=2)
    assert (await ledger.account(recount=True)).dropped == {"stale": 1}


async def test_without_a_bound_nothing_is_stale(ledger: Ledger, stream: SampleStream) -> None:
    await produce(ledger, stream, 1, 90)
    assert ids(await stream.claim("t", 1, 2, 50, max_staleness=None)) == ["e0.0", "e0.1"]


async def test_on_policy_refuses_a_group_newer_than_the_trainer(ledger: Ledger, stream: SampleStream) -> None:
    await produce(ledger, stream, 5)
    with pytest.raises(errors.FailedPrecondition, match=r"e0\.0 was made with weight version 5.*trainer at version 4"):
        await stream.claim("t", 1, 1, 4, max_staleness=0)


async def test_commit_wants_trained_steps_and_frees_their_payloads(
    ledger: Ledger, stream: SampleStream, redis_client: redis.asyncio.Redis
) -> None:
    await produce(ledger, stream, 1, 1, 1)
    for step in (1, 2, 3):
        await stream.claim("t", step, 1, 1, 0)
    await stream.mark_trained(1)
    with pytest.raises(errors.FailedPrecondition, match=r"step 2 .* group e0\.1 is claimed"):
        await stream.commit(2)
    assert await redis_client.xlen(key("r", "samples")) == 3
    await stream.mark_trained(2)
    await stream.mark_trained(2)
    assert (await stream.commit(2), await stream.commit(2)) == (2, 0)
    assert await redis_client.xlen(key("r", "samples")) == 1
    assert (await redis_client.xpending(key("r", "samples"), "trainer"))["pending"] == 1
    assert await ledger.committed_groups() == {1: ["e0.0"], 2: ["e0.1"]}
    await stream.mark_trained(1)


async def test_steps_are_claimed_once_and_in_order(ledger: Ledger, stream: SampleStream) -> None:
    await produce(ledger, stream, 1, 1, 1)
    await stream.claim("t", 2, 1, 1, 0)
    with pytest.raises(errors.FailedPrecondition, match="step 1 cannot be claimed: step 2"):
        await stream.claim("t", 1, 1, 1, 0)
    with pytest.raises(errors.FailedPrecondition, match=r"step 3 .*no recorded claim"):
        await stream.mark_trained(3)


async def test_a_rewind_replays_the_steps_after_the_checkpoint(ledger: Ledger, stream: SampleStream) -> None:
    await produce(ledger, stream, 1, 1, 1, 1)
    for step in (1, 2, 3):
        await stream.claim("t", step, 1, step, None)
        await stream.mark_trained(step)
    await stream.claim("t", 4, 1, 4, None)
    await stream.commit(1)
    assert await stream.rewind(2) == [3, 4]
    account = await ledger.account(recount=True)
    assert (account.trained, account.committed, account.claimed) == (2, 1, 2)
    replay = await stream.claim("t2", 3, 1, 9, 0)
    assert isinstance(replay, Claim) and replay.replayed and replay.trainer_version == 3
    with pytest.raises(errors.FailedPrecondition, match="does not know"):
        await stream.rewind(9)


async def test_a_step_that_is_in_the_checkpoint_is_trained_though_it_was_not_marked(
    ledger: Ledger, stream: SampleStream
) -> None:
    await produce(ledger, stream, 1)
    await stream.claim("t", 1, 1, 1, 0)
    assert await stream.rewind(1) == []
    assert await stream.commit(1) == 1


async def test_prompts_of_a_lost_checkpoint_are_issued_again(ledger: Ledger, stream: SampleStream) -> None:
    await produce(ledger, stream, 1, 1, 1)
    for step in (1, 2, 3):
        await stream.claim("t", step, 1, 1, None)
        await stream.mark_trained(step)
    await stream.commit(2)
    with pytest.raises(errors.FailedPrecondition, match=r"committed step 2.*loaded from step 1"):
        await stream.rewind(1)
    assert await stream.rewind(1, reissue_committed=True) == []
    assert [item.group_id for item in await ledger.groups("waiting")] == ["e0.1", "e0.2"]
    assert await ledger.committed_groups() == {1: ["e0.0"]}
    assert (await ledger.account(recount=True)).imbalances == []
    assert (await ledger.history("e0.1"))[-1].detail == "the checkpoint of step 2 was lost"


async def test_payloads_that_vanish_or_rot_are_named(
    ledger: Ledger, stream: SampleStream, redis_client: redis.asyncio.Redis
) -> None:
    await ledger.issue("a", 1, LEASE, None)
    await stream.put_payload("e0.0", 1, 1, "", b"\xff\xff not a group")
    with pytest.raises(errors.DataLoss, match=r"group e0\.0 in the sample stream cannot be read"):
        await stream.claim("t", 1, 1, 1, 0)
    await redis_client.delete(key("r", "samples"))
    await redis_client.xgroup_create(key("r", "samples"), "trainer", id="0", mkstream=True)
    with pytest.raises(errors.DataLoss, match=r"of group e0\.0, for step 1, is gone"):
        await stream.claim("t", 1, 1, 1, 0)


async def test_large_claims_are_read_in_parts(redis_client: redis.asyncio.Redis) -> None:
    ledger, stream = Ledger(redis_client, "big"), SampleStream(redis_client, "big", 150)
    await ledger.initialise(150, 1)
    for item in await ledger.issue("a", 150, LEASE, None):
        await stream.put(make_group("big", item.group_id))
    assert ids(await stream.claim("t", 1, 150, 1, 0)) == [f"e0.{index}" for index in range(150)]


async def test_wrong_arguments_are_refused(ledger: Ledger, stream: SampleStream) -> None:
    with pytest.raises(errors.InvalidArgument, match="of run 'other', not 'r'"):
        await stream.put(make_group("other", "e0.0"))
    broken = make_group("r", "e0.0")
    broken.samples[1].loss_mask = broken.samples[1].loss_mask[:2]
    with pytest.raises(errors.InvalidArgument, match="loss_mask has 2 entries, token_ids has 3"):
        await stream.put(broken)
    with pytest.raises(errors.FailedPrecondition, match=r"raise rollout\.buffer_groups"):
        await stream.claim("t", 1, 9, 1, 0)
    with pytest.raises(errors.InvalidArgument, match="too_stale is 'keep'"):
        await stream.claim("t", 1, 1, 1, 0, "keep")
    with pytest.raises(errors.InvalidArgument, match="step 0"):
        await stream.claim("t", 0, 1, 1, 0)


async def test_in_data_order_a_step_does_not_depend_on_the_order_of_the_puts(
    ledger: Ledger, stream: SampleStream
) -> None:
    issued = {item.group_id: item.attempt for item in await ledger.issue("a", 5, LEASE, None)}

    async def put(group_id: str) -> None:
        assert await stream.put(make_group("r", group_id, issued[group_id])) == "accepted"

    async def claim(step: int) -> Claim | NotReady:
        return await stream.claim("t", step, 2, 0, None, in_data_order=True)

    for group_id in ("e0.4", "e0.3", "e0.0"):
        await put(group_id)
    assert await claim(1) == NotReady(1, 2), "e0.1 may still come, so e0.3 must wait"
    await ledger.drop("e0.1", issued["e0.1"], "refused")
    assert await claim(1) == NotReady(1, 2), "and so may e0.2"
    await ledger.fail("e0.2", issued["e0.2"], "lost", 0)
    assert await claim(1) == NotReady(1, 2), "which is to be issued again"
    issued |= {item.group_id: item.attempt for item in await ledger.issue("b", 1, LEASE, 0)}
    await put("e0.2")
    assert ids(await claim(1)) == ["e0.0", "e0.2"]
    assert ids(await claim(2)) == ["e0.3", "e0.4"]
    again = await claim(1)
    assert isinstance(again, Claim) and again.replayed
    assert ids(again) == ["e0.0", "e0.2"]
    for step in (1, 2):
        await stream.mark_trained(step)
    assert await stream.commit(2) == 2
    assert (await ledger.account(recount=True)).balanced
