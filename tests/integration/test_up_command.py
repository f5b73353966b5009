"""`paceline up` as the README tells it: quiet while it starts, an OpenAI client, an engine that joins, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALARMS = ("does not answer", "gone", "no account", "Traceback", "silent", "not up", "FAILED")


def block(page: str, info: str, index: int = 0) -> str:
    """A fenced block of a page."""
    return re.findall(rf"^```{info}\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)[index]


class Shell:
    """Commands in one folder, as a user gives them, in a terminal of 80 columns that is none."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "80",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        self.children: list[subprocess.Popen[bytes]] = []

    def __call__(self, command: str) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def start(self, command: str, name: str) -> subprocess.Popen[bytes]:
        with (self.folder / name).open("wb") as log:
            child = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
        self.children.append(child)
        return child

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def until(self, condition: Callable[[], bool], seconds: float = 150) -> None:
        """A poll under a deadline."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = [child for child in self.children if child.poll() is not None]
            logs = [self.said(path.name) for path in self.folder.glob("*.out")]
            assert time.monotonic() < deadline and not ended, logs
            time.sleep(0.1)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    for name in ("tests", "services", "src", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    shell = Shell(tmp_path)
    yield shell
    for child in shell.children:
        if child.poll() is None:
            child.send_signal(signal.SIGINT)
            child.wait(40)


@pytest.mark.timeout(400)
def test_up_status_client_attached_engine_and_ctrl_c(shell: Shell) -> None:
    up = shell.start("paceline up examples/sort4/run.toml", "up.out")
    shell.until((shell.folder / "runs/sort4/config.json").exists)
    starting = 0
    while "OpenAI API" not in shell.said("up.out"):
        assert up.poll() is None, shell.said("up.out")
        for command in ("paceline status", "paceline audit"):
            code, text = shell(command)
            assert code == 0 and not [word for word in ALARMS if word in text], f"{command}: {text}"
            starting += "is starting" in text
    assert starting > 0

    code, text = shell("paceline status")
    assert code == 0
    assert max(map(len, text.splitlines())) <= 80
    assert {"engine-0", "rollout-0", "trainer-0"} <= {line.split(" ")[0] for line in text.splitlines() if line}

    address = re.search(r"OpenAI API http://(127\.0\.0\.1:\d+)/v1", shell.said("up.out"))
    assert address is not None
    shell.until(lambda: "step 2/40" in shell.said("up.out"))
    curl = next(text for text in re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
                if text.startswith("curl"))  # fmt: skip
    code, text = shell(curl.replace("127.0.0.1:PORT", address[1]))
    assert code == 0 and '"text_completion"' in text, text
    (shell.folder / "client.py").write_text(
        next(
            text for text in re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
            if "OpenAI(" in text
        ).replace("127.0.0.1:PORT", address[1])
    )  # fmt: skip
    code, text = shell("python client.py")
    assert code == 0, text

    engine = shell.start(block("examples/attach/README.md", "sh launched").strip(), "engine-1.out")
    shell.until(lambda: "serving weight version" in shell.said("engine-1.out"))
    up.send_signal(signal.SIGINT)
    assert up.wait(60) == 0
    assert "waiting for engine-1 to leave" in shell.said("up.out")
    assert engine.wait(30) == 0
    assert shell.said("engine-1.out").splitlines()[-1].endswith("engine-1 ends: run 'sort4' was taken down")
    assert not (shell.folder / "runs/sort4/launcher.json").exists()
    code, text = shell("paceline status")
    assert code == 1 and "is not up" in text
