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
        ("model.path=models/none", "is no folder; a relative path starts from where the command runs"),
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


WRONG_DATA = {
    "a malformed line": ("", ["prompts.jsonl:2", "max_malformed"]),
    "a missing file": ("data.source.path=nowhere.jsonl", ["nowhere.jsonl does not exist"]),
    "too few prompts": ("run.steps=400", ["12800", "1280", "data.epochs = 10", "run.steps = 40"]),
    "a missing evaluation": ("evaluation.0.source.path=nowhere.jsonl", ["nowhere.jsonl does not exist"]),
    "no template": ("data.chat_template=true", ["has no chat template"]),
    "a function that raises": ("data.source.name=wrong_source:prompts", ["ZeroDivisionError", "line 2 of"]),
}


@pytest.mark.parametrize(
    ("command", "fault"),
    [*(("run", fault) for fault in WRONG_DATA), ("config check", "too few prompts"), ("up", "too few prompts")],
)
def test_wrong_data_is_named_before_anything_starts(
    fault: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "abcd=", "label": "abcd"}\n{"prompt": "dcba=", \n')
    (tmp_path / "wrong_source.py").write_text("def prompts(path):\n    return 1 / 0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    override, parts = WRONG_DATA[fault]
    words = [*command.split(), "examples/sort4/run.toml", override or f"data.source.path={data}"]
    earlier = tmp_path / "runs" / "x"
    earlier.mkdir(parents=True)
    (earlier / "config.json").write_text("{}")
    words += [] if command == "config check" else ["--fresh"]
    code, text = paceline(*words, f"run.directory={earlier}")
    assert code == 2
    assert [part for part in parts if part not in text] == []
    assert "Traceback" not in text
    assert list(earlier.parent.iterdir()) == [earlier], "--fresh must not rename yet"
    assert not (earlier / "logs").exists()


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
