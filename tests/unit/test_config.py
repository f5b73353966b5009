"""Run files: what is wrong is named with the key and the fix; nothing unknown is ever accepted."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from paceline.config import ConfigError, RunFile, load_run_file, parse
from paceline.config.run_file import _all_keys, _model_in

MINIMAL = """
[run]
name = "x"
[model]
path = "tests/assets/sort4"
[data]
source = { name = "jsonl", path = "p.jsonl" }
[[reward.graders]]
name = "exact_match"
"""


def raw() -> dict[str, Any]:
    return tomllib.loads(MINIMAL)


def test_minimal_file_has_documented_defaults() -> None:
    config = parse(raw())
    assert config.rollout.max_staleness == 0
    assert config.trainer.keep_checkpoints == 2
    assert config.directory == Path("runs/x").absolute()


def test_misspelt_key_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'rollout.max_stalenes'; did you mean 'max_staleness'\?"):
        load_overridden("rollout.max_stalenes=1")


def test_key_of_another_table_is_found_where_it_lives() -> None:
    with pytest.raises(ConfigError, match=r"'trainer.learning_rte'; did you mean 'trainer.optimizer.learning_rate'\?"):
        load_overridden("trainer.learning_rte=1e-4")


def load_overridden(*overrides: str, text: str = MINIMAL, folder: Path | None = None) -> RunFile:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(folder or scratch) / "run.toml"
        path.write_text(text)
        return load_run_file(path, overrides)


def test_every_key_misspelt_is_refused() -> None:
    """Mutation: append an x to every key of the schema; each must be an error that names the key."""
    for key in _all_keys(RunFile):
        table, _, leaf = key.rpartition(".")
        of_many = ("evaluation", "reward.graders", "rollout.filters", "trainer.teachers")
        if table.startswith(of_many) or _in_plugin_table(key):
            continue
        bad = f"{key}x" if table else f"{leaf}x"
        with pytest.raises(ConfigError, match="unknown key"):
            load_overridden(f"{bad}=1")


def _in_plugin_table(key: str) -> bool:
    """Other keys of a plug-in table are the plug-in's own options and are checked by it."""
    model: type[BaseModel] | None = RunFile
    for part in key.split(".")[:-1]:
        field = model.model_fields[part] if model else None
        model = _model_in(field.annotation) if field else None
        if model is not None and model.model_config.get("extra") == "allow":
            return True
    return False


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=0", "run.steps = 0"),
        ("run.name=../x", "run.name"),
        ("rollout.max_staleness=-1", "rollout.max_staleness"),
        ("rollout.buffer_groups=2", "buffer_groups = 2 is below rollout.groups_per_step = 8"),
        ("rollout.sampling.temperature=0", "needs temperature > 0"),
        ("rollout.sampling.top_p=0.9", "the trainer's softmax is over the"),
        ("rollout.sampling.top_k=20", "refused for training"),
        ("rollout.sampling.max_new_tokens=512", "leaves no room for a prompt"),
        ("engine.dtype=fp16", "'float32' or 'bfloat16'"),
        ("trainer.keep_checkpoints=1", "trainer.keep_checkpoints"),
        ('trainer.corrections=[{name="tis"}]', "contradicts behaviour"),
    ],
)
def test_wrong_values_are_refused_with_the_reason(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_overridden(override)
    assert message in str(caught.value)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_overridden("run.steps=0", "engine.dtyp=x", "rollout.samples_per_group=0")
    assert len(str(caught.value).splitlines()) == 3


def test_override_values_are_toml_or_text() -> None:
    config = load_overridden("run.steps=3", "rollout.sampling.stop=['a','b']", "model.path=some/where", "run.seed=7")
    assert (config.run.steps, config.rollout.sampling.stop, config.model.path) == (3, ["a", "b"], "some/where")
    with pytest.raises(ConfigError, match="not of the form key=value"):
        load_overridden("run.steps")


def test_resolved_file_loads_to_the_same_digest(tmp_path: Path) -> None:
    config = load_overridden("run.steps=3")
    path = tmp_path / "config.json"
    path.write_text(config.model_dump_json())
    assert load_run_file(path).digest() == config.digest()


def test_missing_file_and_broken_toml_say_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read run file"):
        load_run_file(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("[run\n")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_run_file(tmp_path / "bad.toml")


def test_where_a_run_is_kept_and_watched_does_not_make_it_another() -> None:
    place = ["run.directory=elsewhere", "gateway.listen=127.0.0.1:8000", "dashboard.enabled=false"]
    assert load_overridden(*place).digest() == parse(raw()).digest()
    other = load_overridden("run.steps=7", "trainer.optimizer.learning_rate=0.1")
    assert other.digest() != parse(raw()).digest()
    before, now = parse(raw()).identity(), other.identity()
    assert [key for key in now if before[key] != now[key]] == ["run.steps", "trainer.optimizer.learning_rate"]


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:http", ":80", "127.0.0.1:70000"])
def test_an_address_to_listen_on_is_host_and_port(listen: str) -> None:
    with pytest.raises(ConfigError, match=rf"gateway.listen: '{listen}' is not host:port"):
        load_overridden(f"gateway.listen={listen!r}")
