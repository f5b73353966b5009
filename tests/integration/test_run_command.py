"""`paceline run` as a user sees it: a model that learns, an account that balances, traces without a gap."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

STEPS = 20
GROUPS = 32
PACELINE = [sys.executable, "-m", "paceline.cli.main"]
GROUP_SPANS = {
    "rollout.group", "rollout.generate", "router.generate", "engine.generate", "rollout.score", "reward.score",
    "rollout.put", "trainer.buffer_wait", "trainer.train_group",
}  # fmt: skip


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    directory: Path
    output: str
    summary: dict[str, Any]


def paceline(*words: str, code: int = 0, seconds: float = 300) -> str:
    """Run the command from the repository's root; returns stdout and stderr, in that order."""
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    done = subprocess.run(
        [*PACELINE, *words], capture_output=True, text=True, timeout=seconds, env=environment, check=False
    )
    assert done.returncode == code, f"exit code {done.returncode}, expected {code}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("run") / "sort4"
    output = paceline("run", "examples/sort4/run.toml", f"run.steps={STEPS}", f"run.directory={directory}")
    return Finished(directory, output, json.loads((directory / "summary.json").read_text()))


@pytest.mark.timeout(300)
def test_the_model_learns_and_the_account_balances(finished: Finished) -> None:
    summary = finished.summary
    assert summary["reward_first"] < 0.45
    assert summary["reward_last"] > 0.75
    assert summary["steps"] == STEPS
    assert summary["ledger_balanced"] is True
    assert summary["prompts_trained"] == STEPS * GROUPS
    assert summary["prompts_in_flight"] == 0
    assert summary["staleness_max"] == 0
    assert summary["generated_tokens_per_second"] > 0
    assert summary["logprob_gap_max"] < 1e-4, "sampler and policy must agree in fp32"
    assert "balances" in finished.output
    assert "dashboard http://127.0.0.1:" in finished.output


def test_every_prompt_is_trained_exactly_once(finished: Finished) -> None:
    records = [json.loads(line) for line in (finished.directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    trained = [group for record in records for group in record["group_ids"]]
    assert sorted(trained) == sorted(f"e0.{index}" for index in range(STEPS * GROUPS))
    versions = [record["weight_version"] for record in records]
    assert versions == list(range(2, STEPS + 2))


def test_each_trained_group_has_one_unbroken_trace(finished: Finished) -> None:
    """From the prompt to the optimizer step, through every service (case A24)."""
    store = sqlite3.connect(finished.directory / "telemetry.sqlite")
    traces: dict[str, dict[str, tuple[str, str, str]]] = defaultdict(dict)
    for trace, span, parent, name, group in store.execute(
        "SELECT trace_id, span_id, parent_id, name, group_id FROM spans"
    ):
        traces[trace][span] = (parent, name, group or "")
    groups = {}
    for spans in traces.values():
        roots = [(name, group) for parent, name, group in spans.values() if not parent]
        if roots and roots[0][0] == "rollout.group":
            assert len(roots) == 1
            assert all(parent in spans for parent, _, _ in spans.values() if parent), "a span without its parent"
            groups[roots[0][1]] = {name for _, name, _ in spans.values()}
    assert len(groups) == STEPS * GROUPS
    for group, names in groups.items():
        assert names >= GROUP_SPANS, f"{group} lacks {GROUP_SPANS - names}"
    links = store.execute("SELECT links FROM spans WHERE name = 'trainer.step'").fetchall()
    assert [len(json.loads(item[0])) for item in links] == [GROUPS] * STEPS


def test_export_is_a_hugging_face_folder_of_the_trained_weights(finished: Finished) -> None:
    export = finished.directory / "export"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in export.iterdir()}
    trained = safetensors.numpy.load_file(export / "model.safetensors")
    start = safetensors.numpy.load_file(Path("tests/assets/sort4/model.safetensors"))
    name = "model.embed_tokens.weight"
    assert trained[name].shape == start[name].shape
    assert (trained[name] != start[name]).any()


def test_audit_works_on_a_stopped_run_and_tells_a_prompts_story(finished: Finished) -> None:
    text = paceline("audit", str(finished.directory))
    assert "balances" in text
    assert str(STEPS * GROUPS) in text
    story = paceline("audit", str(finished.directory), "--group", "e0.17")
    for state in ("generating", "buffered", "claimed", "trained"):
        assert state in story
    assert "never issued" in paceline("audit", str(finished.directory), "--group", "e7.1", code=1)


def test_a_finished_run_is_not_trained_again(finished: Finished) -> None:
    before = (finished.directory / "metrics.jsonl").read_bytes()
    again = paceline("run", "examples/sort4/run.toml", f"run.steps={STEPS}", f"run.directory={finished.directory}")
    assert "balances" in again
    assert (finished.directory / "metrics.jsonl").read_bytes() == before


def test_status_of_a_stopped_run_says_so(finished: Finished) -> None:
    assert "is not up" in paceline("status", str(finished.directory), code=1)


def test_another_configuration_in_the_same_folder_is_refused(finished: Finished) -> None:
    text = paceline("run", "examples/sort4/run.toml", "run.steps=7", f"run.directory={finished.directory}", code=2)
    assert "another configuration" in text
    assert "--fresh" in text


def test_nothing_is_left_running(finished: Finished) -> None:
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert str(finished.directory) not in listing


def test_export_from_a_checkpoint_equals_the_runs_own(finished: Finished, tmp_path: Path) -> None:
    paceline("export", str(finished.directory), "--out", str(tmp_path / "model"))
    ours, theirs = tmp_path / "model" / "model.safetensors", finished.directory / "export" / "model.safetensors"
    assert ours.read_bytes() == theirs.read_bytes()
    assert "step-000003" in paceline("export", str(finished.directory), "--step", "3", code=1)
