"""Routing on its way from an engine to a sample: in parts, over a second engine, and refused where it does not fit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.api.common.v1 import generation_pb2 as pb
from paceline.config import ConfigError, load_run_file
from paceline.launcher.evaluation import Exported, evaluation_run
from services.engine import wire
from services.engine.generation import Finish, Piece, Request
from services.rollout.generation import Sequence, add_output, join_routing
from services.router.progress import SampleProgress

RL = Path("examples/sort4/run.toml")
REQUEST = Request("r", np.array([5, 6, 7], np.int32), (1,), with_routing=True)
ROUTING = np.arange(6 * 2 * 2, dtype=np.uint8).reshape(6, 2, 2)


def piece(first: int, last: int, rows: np.ndarray | None, end: bool = False) -> Piece:
    tokens = list(range(first, last))
    return Piece(0, tokens, [-1.0] * len(tokens), [1] * len(tokens), "x" * len(tokens),
                 finish=Finish("stop") if end else None, routing=rows)  # fmt: skip


def joined(messages: list[pb.GenerationOutput]) -> Sequence:
    sequence = Sequence()
    for message in messages:
        add_output(sequence, message)
    join_routing(sequence, 3)
    return sequence


@pytest.mark.parametrize("limit", [2**20, 9, 1])
def test_large_routing_goes_in_parts(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(wire, "MAX_ROUTING_BYTES", limit)
    messages = wire.write_piece(piece(0, 4, ROUTING, end=True), REQUEST, "engine-0")
    assert len(messages) == {2**20: 1, 9: 3, 1: 6}[limit]
    sample = SampleProgress(0, 1)
    relayed = [message for item in messages if (message := sample.accept(item)) is not None]
    sequence = joined(relayed)
    assert sequence.fault == "" and sequence.token_ids == [0, 1, 2, 3]
    assert sequence.routing is not None and (sequence.routing == ROUTING).all()


def test_a_second_engine_repeats_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_ROUTING_BYTES", 4)
    sample = SampleProgress(0, 1)
    first = [sample.accept(item) for item in wire.write_piece(piece(0, 2, ROUTING[:4]), REQUEST, "a")]
    # It breaks off after rows whose tokens never came.
    first += [sample.accept(item) for item in wire.write_piece(piece(2, 3, ROUTING[4:5]), REQUEST, "a")[:-1]]
    sample.restart()
    monkeypatch.setattr(wire, "MAX_ROUTING_BYTES", 2**20)
    second = [sample.accept(item) for item in wire.write_piece(piece(0, 4, ROUTING, end=True), REQUEST, "b")]
    sequence = joined([item for item in first + second if item is not None])
    assert sequence.fault == "" and sequence.token_ids == [0, 1, 2, 3]
    assert sequence.routing is not None and (sequence.routing == ROUTING).all()


def test_routing_that_does_not_cover_its_tokens_is_a_fault() -> None:
    assert "covers 5 tokens, not the 6" in joined(wire.write_piece(piece(0, 4, ROUTING[:5], True), REQUEST, "a")).fault
    assert "covers 0 tokens, not the 6" in joined(wire.write_piece(piece(0, 4, None, True), REQUEST, "a")).fault
    assert "covers 6 tokens, not the 5" in joined(wire.write_piece(piece(0, 3, ROUTING, True), REQUEST, "a")).fault


def test_an_aborted_sample_keeps_the_rows_of_its_tokens() -> None:
    ended = piece(0, 3, ROUTING)
    messages = wire.write_piece(ended, REQUEST, "a")
    messages[-1].finish.reason = pb.FINISH_REASON_ABORT
    found = joined(messages).routing
    assert found is not None and (found == ROUTING[:5]).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.routing_replay=true"], "needs engine.record_routing = true"),
        (["engine.record_routing=true"], "engine.record_routing = true has no reader"),
        (
            ["trainer.routing_replay=true", "engine.record_routing=true", "trainer.backend=megatron"],
            "'megatron' cannot",
        ),
        (["trainer.routing_replay=true", "trainer.compile=true", "trainer.device=cuda"], "leave compile out"),
    ],
)
def test_combinations_that_mean_nothing_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_run_file(RL, overrides)


def test_runs_without_engines_have_no_routing() -> None:
    for name in ("sft", "dpo"):
        with pytest.raises(ConfigError, match=r"trainer.routing_replay does not apply .* no engine records"):
            load_run_file(Path(f"examples/{name}/run.toml"), ["trainer.routing_replay=true"])


def test_a_checkpoint_of_such_a_run_can_be_evaluated(tmp_path: Path) -> None:
    config = load_run_file(RL, ["trainer.routing_replay=true", "engine.record_routing=true"])
    found = evaluation_run(config, Exported(tmp_path, 3), tmp_path / "services")
    assert not found.engine.record_routing and not found.trainer.routing_replay
