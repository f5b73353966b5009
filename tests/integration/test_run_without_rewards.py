"""A run whose grader never gives a reward: it ends by itself, says so everywhere, and its account balances."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BROKEN = """
def always(response):
    raise ValueError("the judge is away")
"""


@pytest.mark.timeout(300)
def test_a_run_without_any_reward_ends_as_failed_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "broken_judge.py").write_text(BROKEN)
    directory, run_file = tmp_path / "run", tmp_path / "run.toml"
    text = Path("examples/sort4/run.toml").read_text().replace('name = "exact_match"', 'name = "broken_judge:always"')
    run_file.write_text(text)
    words = [
        "run", str(run_file), f"run.directory={directory}", "run.steps=2", "rollout.groups_per_step=4",
        "rollout.samples_per_group=2", "evaluation=[]",
    ]  # fmt: skip
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "paceline.cli.main", *words], capture_output=True, text=True, timeout=280, check=False,
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb", "PYTHONPATH": paths},
    )  # fmt: skip
    output = done.stdout + done.stderr
    assert done.returncode == 1, output
    assert "reward none (8 samples without one)  nothing to learn from" in output
    assert "the run has failed: not one of the 16 trajectories of 2 steps had a reward" in output
    assert "none: 16 trajectories, each without one" in output and "nan" not in output
    assert "8 issued = 8 trained" in output, "the account balances"
    assert "exported model" not in output
    assert "trainer-0 ended" not in output, "a trainer that has come to its end is not started again"
    trainer = (directory / "logs" / "trainer-0.log").read_text()
    assert "trainer-0 ends: the run has failed: not one of the 16 trajectories" in trainer
    assert trainer.count("trainer-0 serves on") == 1
    summary = json.loads((directory / "summary.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert (summary["state"], summary["reward_first"], summary["ledger_balanced"]) == ("failed", None, True)
    records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert [record["groups_without_reward"] for record in records] == [4, 4]
    said = (directory / "logs" / "reward-0.log").read_text()
    assert "has no reward: grader always, GRADER_ERROR (ValueError: the judge is away (broken_judge.py:3))" in said
