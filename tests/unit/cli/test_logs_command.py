"""`paceline logs`: the services' words in order of time; the server's only when asked for."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from paceline.cli import audit_command, logs_command, status_command
from paceline.config import ConfigError, load_run_file

REDIS = "17:M 01 Dec 2026 10:00:02.500 * Ready to accept connections tcp"
ENGINE = [
    "warning: printed before the log was set up",
    "2026-12-01 10:00:01,000 I engine: serves",
    "2026-12-01 10:00:03,000 E engine: failed",
    "Traceback (most recent call last):",
    "  a line of it",
]
ROUTER = ["2026-12-01 10:00:02,000 I router: serves", "2026-12-01 10:00:03,500 I router: engine-0 left"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "x"
    (folder / "logs").mkdir(parents=True)
    config = load_run_file(Path("examples/sort4/run.toml"), [f"run.directory={folder}"])
    (folder / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    for name, lines in (("redis", [REDIS]), ("engine-0", ENGINE), ("router-0", ROUTER)):
        (folder / "logs" / f"{name}.log").write_text("\n".join(lines) + "\n")
    return folder


def logs(run: Path, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    parser = argparse.ArgumentParser()
    logs_command.add_arguments(parser)
    assert logs_command.run(parser.parse_args([str(run), *words])) == 0
    return [line[14:] for line in capsys.readouterr().out.splitlines()]


def test_lines_come_in_order_of_time_and_a_traceback_stays_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs(run, capsys) == [ENGINE[0], ENGINE[1], ROUTER[0], *ENGINE[2:], ROUTER[1]]
    assert logs(run, capsys, "-n", "1") == [ROUTER[1]]


def test_the_server_is_heard_when_asked_for(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs(run, capsys, "--service", "redis") == [REDIS]
    assert logs(run, capsys, "-s", "engine") == ENGINE


def test_a_service_that_is_not_there_is_answered_with_those_that_are(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"run 'sort4' has no log of trainer; there are: engine-0, redis, router-0"):
        logs_command.run(argparse.Namespace(run=str(run), service="trainer", lines=1, follow=False))


@pytest.mark.parametrize("command", [logs_command, status_command, audit_command])
def test_a_folder_without_runs_says_how_to_make_one(
    command: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = argparse.Namespace(run="", service="", lines=1, follow=False, group="", all=False)
    with pytest.raises(ConfigError) as error:
        command.run(asked)  # type: ignore[attr-defined]
    assert f"there are no runs in {tmp_path / 'runs'}" in str(error.value)
    assert "paceline run FILE" in str(error.value) and "''" not in str(error.value)
