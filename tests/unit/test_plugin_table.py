"""A table that names a plug-in: what is wrong with it is a ConfigError with the table's key."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.config import ConfigError, PluginTable, make_plugin


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
