"""The kind of a run and its run file: what does not apply is refused by name, and a resolved file can be read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config import ConfigError, RunFile, load_run_file
from paceline.config.kinds import inapplicable, is_generated, services_of

SFT, DPO, RL = (Path(f"examples/{name}/run.toml") for name in ("sft", "dpo", "sort4"))
WITHOUT_ENGINES = ("coordinator", "dashboard", "rollout", "trainer")


def recorded(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "recorded.toml"
    text = ["run.name = 'r'", "model.path = 'tests/assets/sort4'", "data.source = { name = 'recorded', path = 'x' }"]
    path.write_text("\n".join([*text, *lines]))
    return path


def test_labelled_text_preferences_and_recorded_groups_start_no_engine(tmp_path: Path) -> None:
    for path in (SFT, DPO, recorded(tmp_path)):
        config = load_run_file(path)
        assert not is_generated(config)
        assert services_of(config) == WITHOUT_ENGINES
    everything = services_of(load_run_file(RL))
    assert {"engine", "router", "reward", "gateway"} <= set(everything)
    assert "gateway" not in services_of(load_run_file(RL, ["gateway.enabled=false"]))


def test_the_kind_names_episode_loss_and_aggregation(tmp_path: Path) -> None:
    sft, dpo, old = load_run_file(SFT), load_run_file(DPO), load_run_file(recorded(tmp_path))
    assert (sft.rollout.episode.name, sft.trainer.loss.name) == ("supervised", "cross_entropy")
    assert (dpo.rollout.episode.name, dpo.trainer.loss.name) == ("preference", "dpo")
    assert dpo.trainer.aggregation == "seq_mean_token_sum"
    assert dpo.trainer.loss.options() == {"beta": 0.1}
    assert (old.rollout.episode.name, old.trainer.loss.name, old.data.shuffle) == ("recorded", "ppo", False)
    assert load_run_file(SFT, ["rollout.episode.name=my:Own"]).rollout.episode.name == "my:Own"


@pytest.mark.parametrize("path", [SFT, DPO, RL], ids=str)
def test_a_resolved_run_file_can_be_read_again(path: Path) -> None:
    config = load_run_file(path)
    tree = json.loads(config.model_dump_json())
    assert RunFile.model_validate(tree).digest() == config.digest()
    for key in inapplicable(config):
        section, _, leaf = key.partition(".")
        assert leaf not in tree[section] if leaf else section not in tree, key


@pytest.mark.parametrize(
    ("path", "override", "words"),
    [
        (SFT, "rollout.sampling.top_k=3", 'rollout.sampling does not apply with run.kind = "sft": nothing is sampled'),
        (SFT, "rollout.samples_per_group=8", "rollout.samples_per_group does not apply"),
        (SFT, "rollout.max_staleness=0", "rollout.max_staleness does not apply"),
        (SFT, "gateway.enabled=false", "gateway does not apply"),
        (SFT, "trainer.estimator.name=grpo", "trainer.estimator does not apply"),
        (SFT, "trainer.kl_coefficient=0.1", "trainer.kl_coefficient does not apply"),
        (SFT, "trainer.loss.name=ppo", 'trainer.loss = "ppo" does not apply'),
        (SFT, "rollout.episode.name=single_turn", 'rollout.episode = "single_turn" does not apply'),
        (SFT, "evaluation.0.every_steps=5", "evaluate its checkpoints by `paceline eval`"),
        (SFT, "evaluation=[]", "no [[evaluation]] needs one; leave it out"),
        (SFT, "reward.graders=[]", "reward.graders is empty"),
        (DPO, "trainer.aggregation=token_mean", "mean over pairs"),
        (DPO, "trainer.loss.name=cross_entropy", 'it is "dpo"'),
        (RL, "data.overlong=cut", "data.overlong does not apply"),
        (RL, "rollout.episode.name=supervised", 'rollout.episode = "supervised" does not apply'),
        (RL, "trainer.loss.name=dpo", 'trainer.loss = "dpo" does not apply'),
        (RL, "run.kind=sft", "does not apply"),
        (RL, "run.kind=grpo", "run.kind"),
    ],
)
def test_what_does_not_apply_is_refused_by_name(path: Path, override: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_run_file(path, [override])
    assert words in str(caught.value)


def test_recorded_groups_need_no_reward(tmp_path: Path) -> None:
    assert load_run_file(recorded(tmp_path, "trainer.estimator.name = 'grpo'")).trainer.estimator.name == "grpo"
    with pytest.raises(ConfigError, match=r'reward does not apply with data\.source = "recorded"'):
        load_run_file(recorded(tmp_path, "reward.graders = [{ name = 'exact_match' }]"))
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness does not apply"):
        load_run_file(recorded(tmp_path, "rollout.max_staleness = 2"))


def test_a_dump_without_the_recorded_routing_is_refused() -> None:
    overrides = ["rollout.dump=true", "engine.record_routing=true", "trainer.routing_replay=true"]
    with pytest.raises(ConfigError, match=r"rollout\.dump = true keeps no routing"):
        load_run_file(RL, overrides)
