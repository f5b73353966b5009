"""Issue, lease, failure and history of groups, against a real Valkey."""

from __future__ import annotations

import asyncio

import pytest
import redis.asyncio

from paceline.ledger import Issue, Ledger
from paceline.ledger.keys import all_keys, key
from paceline.rpc import errors
from paceline.stream import SampleStream
from paceline.testing.groups import make_group

LEASE = 1000.0


@pytest.fixture
async def ledger(redis_client: redis.asyncio.Redis) -> Ledger:
    item = Ledger(redis_client, "r")
    await item.initialise(dataset_size=4, epochs=2)
    return item


async def test_groups_are_issued_in_the_order_of_the_data_over_epochs(ledger: Ledger) -> None:
    issued = await ledger.issue("a", 20, LEASE, None)
    assert [item.group_id for item in issued] == [f"e{e}.{i}" for e in range(2) for i in range(4)]
    assert await ledger.issue("a", 1, LEASE, None) == []
    assert not (await ledger.account()).exhausted


async def test_the_ceiling_bounds_new_groups_but_not_those_issued_again(ledger: Ledger) -> None:
    assert len(await ledger.issue("a", 8, LEASE, ceiling=3)) == 3
    await ledger.drop("e0.1", 1, "zero_std")
    assert await ledger.issue("a", 8, LEASE, ceiling=3) == [Issue("e0.3", 1)]
    assert await ledger.fail("e0.2", 1, "boom", 3) == "reissued"
    assert await ledger.issue("a", 8, LEASE, ceiling=0) == [Issue("e0.2", 2)]


async def test_groups_to_issue_again_come_first_and_lowest_first(ledger: Ledger) -> None:
    await ledger.issue("a", 4, LEASE, None)
    for group_id in ("e0.3", "e0.0"):
        await ledger.fail(group_id, 1, "boom", 3)
    issued = await ledger.issue("b", 3, LEASE, None)
    assert issued == [Issue("e0.0", 2), Issue("e0.3", 2), Issue("e1.0", 1)]


async def test_leases_are_renewed_released_and_run_out_by_owner(ledger: Ledger) -> None:
    await ledger.issue("a", 2, 1e-6, None)
    await ledger.issue("b", 1, LEASE, None)
    assert await ledger.renew("a", LEASE) == 2
    assert await ledger.expire() == []
    await ledger.renew("a", 1e-6)
    assert sorted(await ledger.expire()) == ["e0.0", "e0.1"]
    assert await ledger.release("b") == ["e0.2"]
    assert (await ledger.account()).waiting == 3


async def test_a_zombie_changes_nothing(ledger: Ledger) -> None:
    await ledger.issue("a", 1, 1e-6, None)
    await ledger.expire()
    await ledger.issue("b", 1, LEASE, None)
    assert await ledger.drop("e0.0", 1, "zero_std") == "stale_attempt"
    assert await ledger.fail("e0.0", 1, "boom", 1) == "stale_attempt"
    assert await ledger.drop("e1.3", 1, "zero_std") == "stale_attempt"
    assert [(item.attempt, item.owner) for item in await ledger.groups("generating")] == [(2, "b")]


async def test_what_was_put_is_not_failed_by_its_producer(ledger: Ledger, redis_client: redis.asyncio.Redis) -> None:
    await ledger.issue("a", 1, LEASE, None)
    assert await SampleStream(redis_client, "r", 4).put(make_group("r", "e0.0")) == "accepted"
    assert await ledger.fail("e0.0", 1, "the reply of put was lost", 1) == "stale_attempt"
    assert (await ledger.account(recount=True)).buffered == 1


async def test_a_group_that_fails_too_often_is_dead_with_its_error(ledger: Ledger) -> None:
    await ledger.issue("a", 1, LEASE, None)
    assert await ledger.fail("e0.0", 1, "first", 2) == "reissued"
    await ledger.issue("a", 1, LEASE, 0)
    assert await ledger.fail("e0.0", 2, "ValueError: bad\nanswer", 2) == "dead"
    assert await ledger.fail("e0.0", 2, "again", 2) == "dead"
    [dead] = await ledger.groups("dead")
    assert (dead.group_id, dead.failures, dead.detail) == ("e0.0", 2, "ValueError: bad answer")
    states = [event.state for event in await ledger.history("e0.0")]
    assert states == ["generating", "waiting", "generating", "dead"]


async def test_history_is_bounded_and_keeps_the_newest(ledger: Ledger) -> None:
    for _ in range(100):
        await ledger.issue("a", 1, LEASE, 1)
        await ledger.release("a")
    history = await ledger.history("e0.0")
    assert 10 < len(history) < 100
    assert (history[-1].state, history[-2].detail) == ("waiting", "attempt 100 by a")


async def test_an_issue_whose_reply_was_lost_is_repeated_not_leaked(
    ledger: Ledger, redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = redis_client.execute_command

    async def lose_reply(*command: object) -> object:
        await send(*command)
        raise redis.exceptions.ConnectionError("reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(redis_client, "execute_command", lose_reply)
        with pytest.raises(errors.Unavailable):
            await ledger.issue("a", 2, LEASE, None)
    assert await ledger.issue("a", 2, LEASE, None) == [Issue("e0.0", 1), Issue("e0.1", 1)]
    assert await ledger.issue("a", 1, LEASE, None) == [Issue("e0.2", 1)]


async def test_initialise_is_idempotent_and_refuses_other_data(ledger: Ledger) -> None:
    await ledger.issue("a", 6, LEASE, None)
    await ledger.initialise(4, 2)
    await ledger.initialise(4, 3)
    assert (await ledger.account()).total == 12
    with pytest.raises(errors.FailedPrecondition, match="data set of 4 prompts, now it has 5"):
        await ledger.initialise(5, 2)
    with pytest.raises(errors.FailedPrecondition, match=r"issued 6 groups.*raise data\.epochs"):
        await ledger.initialise(4, 1)


async def test_without_a_ledger_every_call_says_how_to_get_one_back(redis_client: redis.asyncio.Redis) -> None:
    for call in (Ledger(redis_client, "r").account(), SampleStream(redis_client, "r", 4).claim("t", 1, 1, 1, 0)):
        with pytest.raises(errors.FailedPrecondition, match="restart the trainer, which restores it"):
            await call


async def test_functions_are_loaded_again_when_redis_forgot_them(
    ledger: Ledger, redis_client: redis.asyncio.Redis
) -> None:
    await redis_client.function_flush()
    assert len(await ledger.issue("a", 2, LEASE, None)) == 2


async def test_an_illegal_move_names_group_and_states(ledger: Ledger, redis_client: redis.asyncio.Redis) -> None:
    await ledger.issue("a", 1, 1e-6, None)
    await ledger.expire()
    await redis_client.hset(key("r", "steps"), "1", "e0.0")
    await redis_client.hset(key("r", "meta"), "committed_step", "1")
    with pytest.raises(errors.PacelineError, match=r"group e0\.0 cannot go from waiting to waiting"):
        await SampleStream(redis_client, "r", 4).rewind(0, reissue_committed=True)
    assert (await ledger.account(recount=True)).imbalances == []


async def test_a_waiter_wakes_on_a_change_and_misses_none(ledger: Ledger) -> None:
    token = await ledger.wait_change("", 0)
    await ledger.issue("a", 1, LEASE, None)
    later = await ledger.wait_change(token, 20)
    assert later != token
    assert await ledger.wait_change(later, 0.01) == later
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        waiter = tasks.create_task(ledger.wait_change(later, 20))
        tasks.create_task(ledger.release("a"))
    assert waiter.result() != later


async def test_a_producer_is_not_woken_by_what_opens_nothing(ledger: Ledger, redis_client: redis.asyncio.Redis) -> None:
    stream = SampleStream(redis_client, "r", 4)
    token = await ledger.wait_change("", 0, openings=True)
    for item in await ledger.issue("a", 2, LEASE, None):
        await stream.put(make_group("r", item.group_id, item.attempt, 1))
    assert await ledger.wait_change(token, 0.01, openings=True) == token
    await stream.claim("trainer", 1, 1, 1, 0)
    claimed = await ledger.wait_change(token, 20, openings=True)
    await stream.mark_trained(1)
    trained = await ledger.wait_change(claimed, 20, openings=True)
    await ledger.issue("a", 1, LEASE, None)
    await ledger.release("a")
    assert len({token, claimed, trained, await ledger.wait_change(trained, 20, openings=True)}) == 4


async def test_two_runs_share_nothing_and_all_keys_are_listed(
    ledger: Ledger, redis_client: redis.asyncio.Redis
) -> None:
    other = Ledger(redis_client, "r2")
    await other.initialise(4, 1)
    await other.issue("a", 4, LEASE, None)
    assert (await ledger.account()).issued == 0
    found = {name.decode() for name in await redis_client.keys("*")}
    assert found <= {*all_keys("r"), *all_keys("r2")}


async def test_redis_that_is_down_is_unavailable() -> None:
    client = redis.asyncio.Redis.from_url("unix:///nonexistent/valkey.sock", retry=None)
    with pytest.raises(errors.Unavailable, match="Redis cannot be reached"):
        await Ledger(client, "r").account()


async def test_wrong_arguments_are_refused(ledger: Ledger, redis_url: str) -> None:
    with pytest.raises(errors.InvalidArgument, match="one word"):
        await ledger.drop("e0.0", 1, "two words")
    with pytest.raises(errors.InvalidArgument, match="lease_seconds is 0"):
        await ledger.issue("a", 1, 0, None)
    with pytest.raises(errors.InvalidArgument, match="no group state 'lost'"):
        await ledger.groups("lost")
    with pytest.raises(errors.InvalidArgument, match="must be at least 1"):
        await ledger.initialise(0, 1)
    with pytest.raises(ValueError, match="decode_responses"):
        Ledger(redis.asyncio.Redis.from_url(redis_url, decode_responses=True), "r")
    with pytest.raises(errors.NotFound, match=r"e1\.3"):
        await ledger.history("e1.3")
    with pytest.raises(errors.InvalidArgument, match="cannot restore run 'r'"):
        await ledger.restore({"format": 1, "run_id": "other"})
