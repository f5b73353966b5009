"""The account says so when it does not add up."""

from __future__ import annotations

from paceline.ledger import Account, GroupRecord

META = {
    "issued": "10", "cursor": "10", "dataset_size": "10", "epochs": "1", "n:waiting": "0", "n:generating": "0",
    "n:buffered": "1", "n:claimed": "2", "n:trained": "1", "n:committed": "3", "n:dead": "1", "dropped:stale": "2",
}  # fmt: skip


def test_trained_includes_what_a_checkpoint_contains() -> None:
    account = Account.parse(META)
    assert (account.trained, account.committed, account.in_flight) == (4, 3, 3)
    assert account.dropped == {"stale": 2}
    assert account.balanced and account.exhausted


def test_a_lost_group_is_named_as_an_imbalance() -> None:
    account = Account.parse(META | {"n:claimed": "1"})
    assert not account.balanced
    assert account.imbalances == ["issued is 10, but trained + dropped + dead + in flight is 9"]


def test_a_recount_that_disagrees_names_the_counter() -> None:
    recount = {"n:buffered": 1, "n:claimed": 2, "n:trained": 1, "n:committed": 3, "n:dead": 1, "stream": 4}
    assert Account.parse(META, recount | {"dropped:stale": 2}).balanced
    faults = Account.parse(META, recount | {"dropped:stale": 1, "stream": 5}).imbalances
    assert faults == ["counter dropped:stale is 2, the records say 1", "counter stream is 4, the records say 5"]


def test_exhausted_only_when_nothing_can_be_put_any_more() -> None:
    assert not Account.parse(META | {"n:generating": "1"}).exhausted
    assert not Account.parse(META | {"epochs": "2"}).exhausted


def test_record_is_read_from_its_hash_value() -> None:
    record = GroupRecord.parse(
        "e0.3",
        '["dead",3,3,"rollout-0",0,"",0,"",1]\n1500 generating attempt 1 by rollout-0\n2500 dead division by zero',
    )
    assert (record.state, record.attempt, record.failures, record.refusals) == ("dead", 3, 3, 1)
    assert record.detail == "division by zero"
    assert [event.time for event in record.history] == [1.5, 2.5]
