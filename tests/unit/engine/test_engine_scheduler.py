"""Admission, shared prompts and rows without holes: the scheduler without a model."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.engine.embedded.prefixes import LANES, PrefixTable
from services.engine.embedded.scheduler import Scheduler, Ticket, open_ticket
from services.engine.embedded.stop import StopWatch
from services.engine.generation import Request, Sampling


class NoText:
    def push(self, ids):
        return ""

    def finish(self):
        return ""


def ticket(name: str, prompt: list[int], samples: int) -> Ticket:
    request = Request(name, np.asarray(prompt, np.int32), tuple(range(samples)), Sampling(max_new_tokens=9))
    return open_ticket(request, lambda item: StopWatch(item.sampling, [], NoText()))


def admit(scheduler: Scheduler, version: int = 1):
    admission = scheduler.admit(version)
    for item in admission.sequences:
        item.generated.append(0)
        scheduler.start(item)
    return admission


def test_siblings_start_together_and_their_prompt_is_computed_once():
    scheduler = Scheduler(16)
    scheduler.submit(ticket("a", [1, 2, 3], 5))
    admission = admit(scheduler)
    assert len(admission.sequences) == 5
    assert [(fill.token_ids, fill.source) for fill in admission.fills] == [([1, 2, 3], None)]
    assert [item.num_cached for item in admission.sequences] == [0, 3, 3, 3, 3]


def test_identical_prompts_of_two_requests_share_and_other_versions_do_not():
    scheduler = Scheduler(16)
    scheduler.submit(ticket("a", [1, 2], 2))
    scheduler.submit(ticket("b", [1, 2], 2))
    assert len(admit(scheduler).fills) == 1
    scheduler.submit(ticket("c", [1, 2], 2))
    assert len(admit(scheduler, version=2).fills) == 1
    assert len({item.slot for item in scheduler.running}) == 2


def test_a_group_wider_than_a_slot_copies_its_prompt_instead_of_computing_it_again():
    scheduler = Scheduler(32)
    scheduler.submit(ticket("a", [7], 2 * LANES + 1))
    fills = admit(scheduler).fills
    assert [fill.source is None for fill in fills] == [True, False, False]


def test_a_request_waits_until_all_its_siblings_fit_and_nobody_overtakes_it():
    scheduler = Scheduler(8)
    scheduler.submit(ticket("a", [1], 6))
    scheduler.submit(ticket("b", [2], 4))
    scheduler.submit(ticket("c", [3], 1))
    assert {item.ticket.request.request_id for item in admit(scheduler).sequences} == {"a"}
    scheduler.drop_rows([0, 1])
    assert [item.ticket.request.request_id for item in admit(scheduler).sequences] == ["b"] * 4


def test_a_request_with_more_siblings_than_rows_runs_in_parts():
    scheduler = Scheduler(4)
    scheduler.submit(ticket("a", [1], 10))
    seen = []
    while scheduler.waiting or scheduler.running:
        seen += [item.index for item in admit(scheduler).sequences]
        scheduler.drop_rows(list(range(len(scheduler.running))))
    assert seen == list(range(10))


def test_retracted_sequences_come_back_first_with_their_tokens_as_prompt():
    scheduler = Scheduler(4)
    scheduler.submit(ticket("a", [1, 2], 2))
    admit(scheduler)
    scheduler.submit(ticket("b", [9], 1))
    assert scheduler.retract_all() == 2
    admission = scheduler.admit(2)
    assert [item.ticket.request.request_id for item in admission.sequences] == ["a", "a", "b"]
    assert admission.fills[0].token_ids == [1, 2, 0]


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 3), st.floats(0, 1)), min_size=1, max_size=40))
def test_rows_slots_and_lanes_stay_consistent(steps: list[tuple[int, int, float]]):
    scheduler = Scheduler(24)
    cache: dict[int, object] = {}
    for number, (samples, prompt, share) in enumerate(steps):
        scheduler.submit(ticket(str(number), [prompt] * (prompt + 1), samples))
        for source, target in scheduler.prefixes.compaction():
            for item in scheduler.running:
                item.slot = target if item.slot == source else item.slot
        for item in admit(scheduler).sequences:
            cache[scheduler.running.index(item)] = item
        gone = [row for row in range(len(scheduler.running)) if row < share * len(scheduler.running)]
        for source, target, _ in scheduler.drop_rows(gone):
            cache[target] = cache[source]
        for row, item in enumerate(scheduler.running):
            assert cache[row] is item
            assert scheduler.prefixes.length(item.slot) == len(item.ticket.prompt_ids)
        places = [(item.slot, item.lane) for item in scheduler.running]
        assert len(set(places)) == len(places)
        assert scheduler.prefixes.extent >= scheduler.prefixes.num_used


def test_compaction_brings_used_slots_together():
    table = PrefixTable(16)
    for number in range(12):
        table.place([number], 1, 1)
    for slot in range(9):
        table.release(slot, 0)
    moves = table.compaction()
    assert table.extent == 3
    assert moves == [(11, 0), (10, 1), (9, 2)]
    assert table.place([11], 1, 1) == ([], [(0, 1)])
