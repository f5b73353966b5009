"""What a user gets wrong: each mistake ends in a message that names it and says what to do, before anything is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def paceline(*words: str) -> tuple[int, str]:
    environment = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    command = [sys.executable, "-m", "paceline.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.learning_rte=1", "did you mean 'trainer.optimizer.learning_rate'?"),
        ("reward.graders.0.name=exact_mach", "did you mean 'exact_match'?"),
        ("reward.graders.0.ignore_cas=true", "unknown key 'reward.graders.0.ignore_cas'; did you mean 'ignore_case'?"),
        ("trainer.loss.clip_hih=0.3", "did you mean 'clip_high'?"),
        ("trainer.estimator.name=gpro", "did you mean 'grpo'?"),
        ("model.path=models/none", "must be a Hugging Face model folder"),
        ("reward.graders.0.name=nowhere:score", "no module 'nowhere'"),
        ("data.source.pth=x", "unknown key 'data.source.pth'; did you mean 'path'?"),
    ],
)
def test_a_wrong_key_or_name_is_refused_before_the_start(override: str, message: str, tmp_path: Path) -> None:
    code, text = paceline("run", "examples/sort4/run.toml", override, f"run.directory={tmp_path / 'x'}")
    assert code == 2
    assert message in text
    assert "Traceback" not in text
    assert not (tmp_path / "x" / "logs").exists()


def test_a_malformed_line_is_named_with_its_place(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "abcd=", "label": "abcd"}\n{"prompt": "dcba=", \n')
    code, text = paceline(
        "run", "examples/sort4/run.toml", f"data.source.path={data}", f"run.directory={tmp_path / 'x'}"
    )
    assert code == 2
    assert "prompts.jsonl:2" in text
    assert "max_malformed" in text


def test_more_prompts_than_there_are_is_refused_with_both_numbers(tmp_path: Path) -> None:
    code, text = paceline("run", "examples/sort4/run.toml", "run.steps=400", f"run.directory={tmp_path / 'x'}")
    assert code == 2
    assert "12800" in text
    assert "1280" in text
    assert "data.epochs" in text


def test_a_redis_that_is_not_there_is_named(tmp_path: Path) -> None:
    code, text = paceline(
        "run", "examples/sort4/run.toml", "launcher.redis_url=redis://127.0.0.1:1/0",
        "launcher.start_timeout_seconds=15", f"run.directory={tmp_path / 'x'}",
    )  # fmt: skip
    assert code == 1
    assert "Redis" in text
    assert "127.0.0.1:1" in text


def test_a_run_that_is_up_is_not_started_twice(tmp_path: Path) -> None:
    from paceline.launcher.lock import lock_directory

    with lock_directory(tmp_path / "x"):
        code, text = paceline("run", "examples/sort4/run.toml", f"run.directory={tmp_path / 'x'}", "--fresh")
    assert code == 2
    assert "is up already" in text


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, text = paceline("run", "examples/sort4/run.toml", f"run.directory={tmp_path / 'file' / 'x'}")
    assert code == 2
    assert "cannot be written" in text


def test_a_reward_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reward.py").write_text("import nosuchmodule\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, text = paceline("config", "check", "examples/sort4/run.toml", "reward.graders.0.name=broken_reward:score")
    assert code == 2
    assert "'broken_reward:score' cannot be imported: ModuleNotFoundError: No module named 'nosuchmodule'" in text
    assert "Traceback" not in text
