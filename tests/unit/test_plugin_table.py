"""A table that names a plug-in: what is wrong with it is a ConfigError with the table's key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.config import ConfigError, PluginTable, make_plugin, parse
from paceline.config.check import check


def test_a_plugin_is_made_with_its_options_and_arguments(tmp_path: Path) -> None:
    table = PluginTable.model_validate({"name": "disk", "root": str(tmp_path)})
    assert make_plugin("transport", table, "weights.transport", tmp_path, "r").stage(1).parent == tmp_path / "r"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "dusk"}, "weights.transport.name: unknown transport 'dusk'; did you mean 'disk'?"),
        ({"name": "no.such:Thing"}, "weights.transport.name: transport 'no.such:Thing': no module 'no.such'"),
        ({"name": "pathlib:Path"}, "weights.transport.name: 'pathlib:Path' is no transport"),
        ({"name": "disk", "rot": "x"}, "unknown key 'weights.transport.rot'; did you mean 'root'?"),
    ],
)
def test_a_wrong_table_is_refused_with_its_key(table: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_plugin("transport", PluginTable.model_validate(table), "weights.transport")
    assert message in str(caught.value)


FUNCTIONS = """
def words(count, start=0): return ["a"] * count
def score(response): return 1.0
"""


@pytest.mark.parametrize(
    ("table", "options", "fault"),
    [
        ("data.source", {"name": "functions_here:words", "count": 3}, ""),
        ("data.source", {"name": "functions_here:words"}, "missing a required argument: 'count'"),
        ("data.source", {"name": "functions_here:words", "count": 3, "stop": 4}, "unexpected keyword argument 'stop'"),
        ("reward.graders.0", {"name": "functions_here:score"}, ""),
        ("reward.graders.0", {"name": "functions_here:score", "strict": True}, "takes no options, but has strict"),
        ("trainer.loss", {"name": "functions_here:score"}, "is no loss: it has no nested class Options"),
    ],
)
def test_functions_are_checked_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, options: dict[str, Any], fault: str
) -> None:
    (tmp_path / "functions_here.py").write_text(FUNCTIONS)
    (tmp_path / "p.jsonl").write_text('{"prompt": "dcba=", "label": "abcd"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    raw: dict[str, Any] = {
        "run": {"name": "x", "steps": 1},
        "model": {"path": "tests/assets/sort4"},
        "data": {"source": {"name": "jsonl", "path": str(tmp_path / "p.jsonl")}},
        "rollout": {"groups_per_step": 1},
        "reward": {"graders": [{"name": "exact_match"}]},
        "trainer": {},
    }
    section, _, key = table.partition(".")
    raw[section][key.partition(".")[0]] = [options] if key.endswith(".0") else options
    if not fault:
        return check(parse(raw))
    with pytest.raises(ConfigError) as caught:
        check(parse(raw))
    assert table in str(caught.value) and fault in str(caught.value)
