"""deploy/compose.yaml names every service, publishes on loopback only, and passes a run file that services accept."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from paceline.config import load_run_file
from paceline.config.place import SERVICES

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]


def test_every_service_is_there_with_an_image_of_its_own() -> None:
    assert set(COMPOSE) == {*SERVICES, "redis"}
    for service in SERVICES:
        build = COMPOSE[service]["build"]
        assert (ROOT / build["dockerfile"]).is_file()
        assert COMPOSE[service]["image"].startswith(f"paceline/{service}:")


def test_nothing_is_published_off_loopback_and_nothing_is_unbounded() -> None:
    for service in COMPOSE.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert service["mem_limit"] and service["read_only"] and service["cap_drop"] == ["ALL"]


def test_every_address_that_a_service_may_ask_for_is_set() -> None:
    for service in SERVICES:
        environment = COMPOSE[service]["environment"]
        assert {f"PACELINE_{other.upper()}_ADDR" for other in SERVICES} <= set(environment)
        if service == "engine":
            # There may be several, so each takes its name and address from its container.
            command = " ".join(COMPOSE[service]["entrypoint"])
            assert 'PACELINE_MEMBER_ID="engine-$$HOSTNAME"' in command
            assert 'PACELINE_ADVERTISE="$$HOSTNAME:50051"' in command
        elif service != "coordinator":
            assert environment["PACELINE_ADVERTISE"] == f"{service}:50051"


def test_what_refuses_its_configuration_is_not_started_again_and_again(tmp_path: Path) -> None:
    """A restart policy tells no exit codes apart, so the service itself stays until it is stopped."""
    name = "PACELINE_WHEN_REFUSED"
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[rum]\n")
    for service in SERVICES:
        assert COMPOSE[service]["restart"] in ("unless-stopped", "on-failure")
        environment = {**os.environ, name: COMPOSE[service]["environment"][name]}
    for words, reason in (
        ([str(wrong)], "unknown key 'rum'"),
        (["run.toml", "--no-such-flag"], "unrecognized arguments"),
    ):
        process = subprocess.Popen(
            [sys.executable, "-m", "services.reward", *words],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        said = ""
        while name not in said:
            line = process.stderr.readline()
            assert line, f"it ended: {said}"
            said += line
        assert reason in said
        assert process.poll() is None
        process.terminate()
        assert process.wait(20) == 2
        process.stderr.close()


def test_the_command_is_a_run_file_that_parses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", COMPOSE["trainer"]["command"])
    run_file, *overrides = shlex.split(text)
    config = load_run_file(Path(run_file), overrides)
    assert config.weights.transport.name == "disk"
    assert str(config.directory).startswith("/var/lib/paceline/")


def test_a_run_without_engines_parses_when_their_keys_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = COMPOSE["trainer"]["command"].replace("sort4", "sft")
    text = re.sub(r"\$\{PACELINE_ENGINE_OPTIONS-[^}]*\}", "", text)
    run_file, *overrides = shlex.split(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))
    assert load_run_file(Path(run_file), overrides).run.kind == "sft"


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_installs_its_own_extra_and_runs_unprivileged(service: str) -> None:
    lines = (ROOT / f"deploy/docker/{service}.Dockerfile").read_text().splitlines()
    assert any(f'".[{service}]"' in line and "-c constraints.txt" in line for line in lines)
    assert "USER 10001" in lines
    assert f'ENTRYPOINT ["python", "-m", "services.{service}"]' in lines
    assert not any(line.startswith("# syntax") or "<<" in line for line in lines)
