"""When a sample ends: ids, strings across token borders, and the limit."""

from __future__ import annotations

from services.engine.embedded.stop import StopWatch
from services.engine.generation import Sampling


class Letters:
    """Ids stand for pieces of text; a piece that ends in a half character waits, as a detokenizer does."""

    def __init__(self, pieces: list[str]) -> None:
        self.pieces = pieces

    def push(self, ids):
        return "".join(self.pieces[item] for item in ids)

    def finish(self):
        return ""


def run(pieces: list[str], sampling: Sampling, eos: tuple[int, ...] = ()):
    """(number of tokens taken, reason, what matched, text)."""
    watch = StopWatch(sampling, eos, Letters(pieces))
    for count in range(1, len(pieces) + 1):
        ended = watch.add(count - 1, count)
        if ended:
            return count, *ended, watch.take_text(last=True)
    return len(pieces), None, "", watch.take_text(last=True)


def test_a_stop_string_within_one_token():
    assert run(["a", "b;c", "d"], Sampling(stop=(";",))) == (2, "stop", ";", "ab;c")


def test_a_stop_string_across_token_borders():
    assert run(["x<", "/an", "swer", "> y"], Sampling(stop=("</answer>",))) == (4, "stop", "</answer>", "x</answer> y")


def test_a_stop_string_whose_start_came_several_tokens_ago():
    assert run(["a", "b", "a", "b", "c", "d"], Sampling(stop=("abc",)))[:3] == (5, "stop", "abc")


def test_the_first_of_several_stop_strings_in_the_text_is_named():
    assert run(["one two\n\n"], Sampling(stop=("\n\n", "two"))) == (1, "stop", "two", "one two\n\n")


def test_no_false_match_over_text_that_was_already_searched():
    assert run(["a", "", "a"], Sampling(stop=("aaa",)))[1] is None


def test_end_of_sequence_unless_ignored():
    assert run(["a", "b", "c"], Sampling(), eos=(1,))[:3] == (2, "stop", "1")
    assert run(["a", "b", "c"], Sampling(ignore_eos=True), eos=(1,))[1] is None


def test_stop_ids_even_when_end_of_sequence_is_ignored():
    sampling = Sampling(stop_token_ids=frozenset({2}), ignore_eos=True)
    assert run(["a", "b", "c"], sampling, eos=(1,))[:3] == (3, "stop", "2")


def test_the_limit():
    assert run(["a"] * 9, Sampling(max_new_tokens=4))[:3] == (4, "length", "")


def test_a_stop_on_the_last_allowed_token_counts_as_stop():
    assert run(["a", "b", ";"], Sampling(max_new_tokens=3, stop=(";",)))[1] == "stop"
