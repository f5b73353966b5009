"""Any interleaving of producers, a trainer, crashes and a lost Redis does to the ledger what it does to the model."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import redis.asyncio
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from ledger_model import LedgerModel

from paceline.ids import new_id
from paceline.ledger import STATES, Ledger
from paceline.ledger.keys import all_keys, key
from paceline.rpc import errors
from paceline.stream import Claim, NotReady, SampleStream
from paceline.testing.groups import make_group

OWNERS = st.sampled_from(["rollout-0", "rollout-1"])
LONG, SPENT = 1000.0, 1e-6
PER_STEP = 2


class LedgerMachine(RuleBasedStateMachine):
    """Two producers and one trainer that restarts. `handed` is everything that was ever issued: zombies use it too."""

    redis_url = ""
    STATES_IN_DETAIL = ("waiting", "generating", "trained", "dead")

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.run_id = new_id()
        self.handed: list[tuple[str, int]] = []
        self.saved: tuple[dict[str, Any], LedgerModel] | None = None
        self.version = 1
        self.fence = 0
        self.replaced: list[SampleStream] = []

    def do(self, coroutine: Any) -> Any:
        return self.runner.run(coroutine)

    def connect(self) -> None:
        self.ledger = Ledger(self.client, self.run_id)
        self.stream = SampleStream(self.client, self.run_id, self.model.capacity)
        if self.fence:
            self.ledger.hold(self.fence, f"life-{self.fence}")
            self.stream.hold(self.fence, f"life-{self.fence}")

    @initialize(bound=st.sampled_from([None, 0, 1]), policy=st.sampled_from(["reissue", "drop"]))
    def start(self, bound: int | None, policy: str) -> None:
        self.bound, self.policy = bound, policy
        self.model = LedgerModel(size=4, epochs=2, capacity=3)
        self.client = redis.asyncio.Redis.from_url(self.redis_url, socket_timeout=30)
        self.connect()
        self.do(self.ledger.initialise(4, 2))

    def teardown(self) -> None:
        try:
            if hasattr(self, "client"):
                self.finish()
                self.do(self.client.delete(*all_keys(self.run_id)))
                self.do(self.client.aclose())
        finally:
            self.runner.close()

    @rule(owner=OWNERS, count=st.integers(1, 3), spent=st.booleans(), ceiling=st.sampled_from([None, 3, 6]))
    def issue(self, owner: str, count: int, spent: bool, ceiling: int | None) -> None:
        issued = self.do(self.ledger.issue(owner, count, SPENT if spent else LONG, ceiling))
        pairs = [(item.group_id, item.attempt) for item in issued]
        assert pairs == self.model.issue(owner, count, spent, ceiling)
        self.handed += pairs

    @rule(owner=OWNERS, spent=st.booleans())
    def renew(self, owner: str, spent: bool) -> None:
        assert self.do(self.ledger.renew(owner, SPENT if spent else LONG)) == self.model.renew(owner, spent)

    @rule()
    def expire(self) -> None:
        assert set(self.do(self.ledger.expire())) == self.model.reclaim(None)

    @rule(owner=OWNERS)
    def producer_restarts(self, owner: str) -> None:
        assert set(self.do(self.ledger.release(owner))) == self.model.reclaim(owner)

    def put_one(self, group_id: str, attempt: int, version: int) -> str:
        group = make_group(self.run_id, group_id, attempt, version)
        try:
            outcome = self.do(self.stream.put(group))
        except errors.ResourceExhausted:
            outcome = "full"
        assert outcome == self.model.put(group_id, attempt, version)
        return outcome

    @precondition(lambda self: self.handed)
    @rule(data=st.data(), behind=st.integers(0, 2))
    def put(self, data: st.DataObject, behind: int) -> None:
        self.put_one(*data.draw(st.sampled_from(self.handed)), max(1, self.version - behind))

    @precondition(lambda self: self.model.in_state("generating"))
    @rule(data=st.data())
    def put_current(self, data: st.DataObject) -> None:
        group = data.draw(st.sampled_from(self.model.in_state("generating")))
        self.put_one(group.group_id, group.attempt, self.version)

    @rule(owner=OWNERS, count=st.integers(1, 4), behind=st.integers(0, 1))
    def produce(self, owner: str, count: int, behind: int) -> None:
        self.issue(owner, count, False, None)
        for group in self.model.in_state("generating")[:count]:
            self.put_one(group.group_id, group.attempt, max(1, self.version - behind))

    @precondition(lambda self: self.handed)
    @rule(data=st.data(), reason=st.sampled_from(["zero_std", "prompt_too_long"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        group_id, attempt = data.draw(st.sampled_from(self.handed))
        assert self.do(self.ledger.drop(group_id, attempt, reason)) == self.model.drop(group_id, attempt, reason)

    @precondition(lambda self: self.handed)
    @rule(data=st.data(), most=st.sampled_from([0, 2]))
    def fail(self, data: st.DataObject, most: int) -> None:
        group_id, attempt = data.draw(st.sampled_from(self.handed))
        assert self.do(self.ledger.fail(group_id, attempt, "boom\nat 3", most)) == self.model.fail(
            group_id, attempt, most
        )

    @rule(consumer=st.sampled_from(["trainer-a", "trainer-b"]), ahead=st.integers(-1, 1))
    def claim(self, consumer: str, ahead: int) -> None:
        step = max([self.model.committed_step, *self.model.claims]) + ahead
        self.claim_one(consumer, max(1, step))

    def claim_one(self, consumer: str, step: int) -> Claim | NotReady | None:
        expected = self.model.claim(step, PER_STEP, self.version, self.bound, self.policy)
        recorded = expected is not None and self.do(self.client.hexists(key(self.run_id, "claims"), str(step)))
        try:
            got = self.do(self.stream.claim(consumer, step, PER_STEP, self.version, self.bound, self.policy))
        except errors.FailedPrecondition:
            assert expected is None
            return None
        if isinstance(got, NotReady):
            assert got.have == expected
        else:
            names = [group.group_id for group in got.groups]
            assert (got.trainer_version, got.refused, names) == expected
            assert got.replayed == recorded
        return got

    @rule(train=st.booleans())
    def next_step(self, train: bool) -> None:
        step = max([self.model.committed_step, *self.model.claims]) + 1
        if isinstance(self.claim_one("trainer-a", step), Claim) and train:
            self.do(self.stream.mark_trained(step))
            assert self.model.mark_trained(step)

    @rule(back=st.integers(0, 1))
    def train(self, back: int) -> None:
        step = max(1, max([self.model.committed_step, *self.model.claims]) - back)
        try:
            self.do(self.stream.mark_trained(step))
            done = True
        except errors.FailedPrecondition:
            done = False
        assert done == self.model.mark_trained(step)

    @rule()
    def publish(self) -> None:
        self.version += 1

    @rule(back=st.integers(0, 2))
    def commit(self, back: int) -> None:
        step = max([self.model.committed_step, *self.model.claims]) - back
        try:
            done = self.do(self.stream.commit(step))
        except errors.FailedPrecondition:
            done = None
        assert done == self.model.commit(step)

    @rule(back=st.integers(-1, 2), reissue=st.booleans())
    def trainer_restarts(self, back: int, reissue: bool) -> None:
        step = max(0, max([self.model.committed_step, *self.model.claims]) - back)
        try:
            replay = self.do(self.stream.rewind(step, reissue))
        except errors.FailedPrecondition:
            replay = None
        assert replay == self.model.rewind(step, reissue)

    @rule(back=st.integers(0, 1))
    def trainer_is_replaced(self, back: int) -> None:
        """A new trainer takes the run; from its first operation on the one before is a ghost."""
        self.replaced.append(self.stream)
        self.fence += 1
        self.connect()
        self.trainer_restarts(back, False)

    @precondition(lambda self: self.replaced)
    @rule(data=st.data(), what=st.sampled_from(["claim", "mark_trained", "commit", "rewind"]), step=st.integers(0, 4))
    def ghost(self, data: st.DataObject, what: str, step: int) -> None:
        """A frozen trainer comes back: it is refused, whatever it does, and nothing changes (see the invariant)."""
        ghost = data.draw(st.sampled_from(self.replaced))
        more = ("ghost", max(1, step), PER_STEP, self.version, self.bound) if what == "claim" else (step,)
        with pytest.raises(
            errors.FailedPrecondition, match=f"replaced by trainer life-{self.fence} .fence {self.fence}"
        ):
            self.do(getattr(ghost, what)(*more))

    @rule()
    def snapshot(self) -> None:
        self.saved = (self.do(self.ledger.snapshot()), copy.deepcopy(self.model))

    @precondition(lambda self: self.saved is not None)
    @rule(lost=st.booleans())
    def restore(self, lost: bool) -> None:
        snapshot, model = self.saved
        if lost:
            self.do(self.client.delete(*all_keys(self.run_id)))
            with pytest.raises(errors.FailedPrecondition, match="has no ledger"):
                self.do(self.ledger.account())
            self.model = model.restored()
        assert self.do(self.ledger.restore(snapshot)) == lost
        self.replaced = []  # they would be refused because of the ledger's identity
        self.connect()

    @invariant()
    def accounts_agree(self) -> None:
        if not hasattr(self, "client"):
            return
        account = self.do(self.ledger.account(recount=True))
        assert account.imbalances == []
        settled = self.model.settled_before["committed"]
        for state in ("waiting", "generating", "buffered", "claimed", "dead"):
            assert getattr(account, state) == len(self.model.in_state(state)), state
        assert account.committed == len(self.model.in_state("committed")) + settled
        assert account.trained == len(self.model.in_state("trained", "committed")) + settled
        assert account.dropped == {reason: n for reason, n in self.model.dropped.items() if n}
        records = [item for state in self.STATES_IN_DETAIL for item in self.do(self.ledger.groups(state))]
        expected = self.model.in_state(*self.STATES_IN_DETAIL)
        assert {(r.group_id, r.state, r.attempt, r.failures) for r in records} == {
            (g.group_id, g.state, g.attempt, g.failures) for g in expected
        }
        assert (account.issued, account.refused_stale) == (self.model.issued, self.model.refused_stale)

    def finish(self) -> None:
        """Run to the end of the data: each prompt of the run is then settled exactly once."""
        self.version += 1
        self.do(self.ledger.release("rollout-0"))
        self.do(self.ledger.release("rollout-1"))
        self.model.reclaim("rollout-0")
        self.model.reclaim("rollout-1")
        for step in sorted(self.model.claims):
            self.claim_one("trainer-a", step)
            self.do(self.stream.mark_trained(step))
            self.model.mark_trained(step)
        step = max([self.model.committed_step, *self.model.claims])
        while True:
            self.issue("rollout-0", 3, False, None)
            for group in self.model.in_state("generating"):
                self.put_one(group.group_id, group.attempt, self.version)
            if not isinstance(self.claim_one("trainer-a", step + 1), Claim):
                account = self.do(self.ledger.account())
                if account.exhausted:
                    break
                continue
            step += 1
            self.do(self.stream.mark_trained(step))
            self.model.mark_trained(step)
        assert self.do(self.stream.commit(step)) == self.model.commit(step)
        self.accounts_agree()
        ends = [item.group_id for state in STATES for item in self.do(self.ledger.groups(state))]
        assert sorted(ends) == sorted(self.model.groups)
        committed = [name for names in self.do(self.ledger.committed_groups()).values() for name in names]
        assert len(set(committed)) == len(committed)
        account = self.do(self.ledger.account(recount=True))
        assert account.issued == 8
        assert account.trained + sum(account.dropped.values()) + account.dead + account.buffered == 8
        assert account.buffered < PER_STEP


def test_any_interleaving_keeps_the_account(redis_url: str) -> None:
    LedgerMachine.redis_url = redis_url
    run_state_machine_as_test(
        LedgerMachine,
        # No shrinking: it would outlast the time limit of a test, and the failing steps are printed anyway.
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
            suppress_health_check=list(HealthCheck),
        ),
    )
