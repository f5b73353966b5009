"""The reward decorator, and how a function beside the run file is found."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.environment import reward
from paceline.environment.reward import inspect_reward
from paceline.plugins import UnknownPlugin, registry


def test_a_marked_function_stays_a_function_and_knows_what_it_takes() -> None:
    @reward
    def short(response: str, limit: int = 5) -> float:
        return float(len(response) < limit)

    @reward(name="care")
    async def careful(*, prompt: str, metadata: dict[str, Any]) -> float:
        return 1.0

    assert short("abc") == 1.0
    assert asyncio.run(careful(prompt="", metadata={})) == 1.0
    assert inspect_reward(short).arguments == ("response",)
    assert (inspect_reward(careful).name, inspect_reward(careful).arguments) == ("care", ("prompt", "metadata"))


def test_a_plain_function_and_one_that_takes_everything_will_do() -> None:
    assert inspect_reward(lambda response: 1).arguments == ("response",)
    assert inspect_reward(lambda **given: 1).arguments == ("response", "prompt", "metadata")


def test_a_parameter_that_nobody_fills_is_an_error_where_it_is_written() -> None:
    with pytest.raises(TypeError, match=r"reward 'wrong': unknown parameter 'answer'; .* response, prompt, metadata"):

        @reward
        def wrong(answer: str) -> float:
            return 1.0

    with pytest.raises(TypeError, match="'response' is positional-only"):

        @reward
        def positional(response: str, /) -> float:
            return 1.0


def test_a_module_in_the_working_directory_is_found_by_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward_beside_run_file.py").write_text("def score(response):\n    return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert registry("grader").load("reward_beside_run_file:score")("x") == 1
    with pytest.raises(UnknownPlugin, match="no module 'reward_elsewhere'"):
        registry("grader").load("reward_elsewhere:score")
