"""Every built-in source, episode and filter has strict options, and loads where nothing heavy is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.config import StrictModel
from paceline.plugins import registry

KINDS = {"source": ("__len__", "__getitem__"), "episode": ("run",), "filter": ("keep",)}
BUILT_IN = [(kind, name) for kind in KINDS for name in registry(kind).available()]


@pytest.mark.parametrize(("kind", "name"), BUILT_IN)
def test_a_built_in_has_strict_options_and_the_methods_of_its_kind(kind: str, name: str) -> None:
    plugin = registry(kind).load(name)
    assert issubclass(plugin.Options, StrictModel)
    assert plugin.Options.model_config["extra"] == "forbid"
    assert plugin.__doc__
    for method in KINDS[kind]:
        assert callable(getattr(plugin, method))


def test_all_of_them_load_without_the_packages_they_may_use() -> None:
    blocked = ("torch", "transformers", "tokenizers", "jinja2", "pyarrow", "reasoning_gym")
    code = f"import sys\nfor name in {blocked!r}: sys.modules[name] = None\n"
    code += "from paceline.plugins import registry\n"
    code += f"for kind, name in {BUILT_IN!r}: registry(kind).load(name)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_each_kind_has_its_built_ins() -> None:
    assert {"jsonl", "parquet", "reasoning_gym"} <= set(registry("source").available())
    assert {"nonzero_std", "no_missing"} <= set(registry("filter").available())
    assert "single_turn" in registry("episode").available()
