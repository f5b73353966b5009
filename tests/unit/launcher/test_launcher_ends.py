"""One launcher a folder, an end that hides nothing, and nothing left in memory by a launcher that was killed."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import doctor_command
from paceline.config import ConfigError, RunFile, load_run_file
from paceline.launcher import leftovers
from paceline.launcher.launcher import Launcher
from paceline.launcher.lock import is_locked, lock_directory
from paceline.weights.manifest import Manifest
from paceline.weights.transports import shm
from paceline.weights.transports.shm import Shm


def config_in(folder: Path, *overrides: str) -> RunFile:
    return load_run_file(Path("examples/sort4/run.toml"), [f"run.directory={folder}", *overrides])


async def test_a_launcher_refuses_the_folder_of_another_and_leaves_it_alone(tmp_path: Path) -> None:
    with lock_directory(tmp_path):
        (tmp_path / "launcher.json").write_text("{}")
        launcher = Launcher(config_in(tmp_path))
        with pytest.raises(ConfigError, match="is up already"):
            await launcher.start()
        await launcher.stop()
        assert (tmp_path / "launcher.json").read_text() == "{}"
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


async def test_a_launcher_refuses_a_folder_with_another_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_in(tmp_path, "run.steps=7").model_dump_json())
    launcher = Launcher(config_in(tmp_path))
    with pytest.raises(ConfigError, match=r"another configuration \(run.steps was 7, is \d+\)"):
        await launcher.start()
    await launcher.stop()
    assert not is_locked(tmp_path)
    assert "7" in (tmp_path / "config.json").read_text()


async def test_an_end_that_cannot_clear_up_hides_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What launcher.json has become cannot be unlinked; the reason of the end must still be the one seen."""
    launcher = Launcher(config_in(tmp_path, "launcher.redis_url=redis://127.0.0.1:1/0"))
    (tmp_path / "launcher.json").mkdir()
    with pytest.raises(OSError, match=r"launcher\.json"):
        try:
            await launcher.start()
        finally:
            await launcher.stop()
    assert "not all of the run" in caplog.text
    assert not is_locked(tmp_path)


def publish(memory: Path, run_directory: Path) -> Shm:
    memory.mkdir(exist_ok=True)
    transport = Shm(Shm.Options(root=str(memory)), run_directory, "sums")
    stage = transport.stage(1)
    Manifest.describe(stage, 1, 0, "full").write(stage)
    transport.publish(stage, 1)
    return transport


PUBLISHER = """
import sys
from pathlib import Path
from tests_leftovers import publish
publish(Path(sys.argv[1]), Path(sys.argv[2]))
print("published", flush=True)
sys.stdin.read()
"""


def test_only_what_no_launcher_and_no_process_holds_is_left_over(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    code = PUBLISHER.replace("tests_leftovers", Path(__file__).stem)
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(memory), str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={"PYTHONPATH": str(Path(__file__).parent)},
    )  # fmt: skip
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == b"published\n"
        assert leftovers.find(memory) == [], "a trainer or an engine that was started by hand holds it"
    finally:
        process.kill()
        process.wait()
    (memory / "paceline-foreign-123456789abc").mkdir()
    with lock_directory(tmp_path / "run"):
        assert leftovers.find(memory) == [], "its launcher restarts the trainer"
    (found,) = leftovers.find(memory)
    assert found.run_directory == tmp_path / "run" and found.num_bytes > 0
    shutil.rmtree(tmp_path / "run")
    assert leftovers.remove(memory) == [found]
    assert [path.name for path in memory.iterdir()] == ["paceline-foreign-123456789abc"]


def test_doctor_reports_what_a_killed_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = tmp_path / "memory"
    held = publish(memory, tmp_path / "run")
    monkeypatch.setattr(shm, "MEMORY", memory)
    monkeypatch.setenv("COLUMNS", "1000")
    doctor_command.run(argparse.Namespace())
    assert str(held.root) not in capsys.readouterr().out
    held.release()
    doctor_command.run(argparse.Namespace())
    assert f"{held.root}: 0 MiB of the run in {tmp_path / 'run'}, which was killed" in capsys.readouterr().out


def test_a_reader_holds_the_folder_and_a_publisher_makes_it_again(tmp_path: Path) -> None:
    memory, run_directory = tmp_path / "memory", tmp_path / "run"
    first = publish(memory, run_directory)
    reader = Shm(Shm.Options(root=str(memory)), run_directory, "sums")
    assert reader.open(str(first.root / "v00000001")).is_dir()
    assert first.collect(set()) == [1]
    assert not first.root.exists()
    stage = first.stage(2)
    Manifest.describe(stage, 2, 1, "full").write(stage)
    assert Path(first.publish(stage, 2)).is_dir()
    assert leftovers.find(memory) == []
