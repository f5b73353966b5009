"""A step with estimators of tokens, a critic, several passes, and leftover groups."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_trainer_step import group

from paceline.config import ConfigError, make_plugin
from paceline.config.trainer import TrainerConfig
from paceline.samples import InvalidSample, SampleGroup
from services.trainer.algorithms.base import TokenAdvantages, TrajectoryTokens
from services.trainer.backends.torch import TorchBackend
from services.trainer.critic.critic import make_critic
from services.trainer.critic.with_critic import with_critic
from services.trainer.datum import Group
from services.trainer.estimation.estimate import check_estimator
from services.trainer.objective import Objective
from services.trainer.step.data import StepGroup, cuts
from services.trainer.step.schedule import learning_rate
from services.trainer.step.step_trainer import StepResult, StepTrainer


class Trainer:
    """What the trainer's process is made of, without the process."""

    def __init__(self, path: Path, total_steps: int = 10, own: object | None = None, **fields: object) -> None:
        fields = {"optimizer": {"learning_rate": 1e-3}, **fields}
        self.config = TrainerConfig.model_validate(fields)
        self.policy = TorchBackend(path, self.config, 0)
        self.critic = make_critic(path, self.config, 0, total_steps)
        self.backend = with_critic(self.policy, self.critic)
        estimator = own or make_plugin("estimator", self.config.estimator, "trainer.estimator")
        objective = Objective.from_config(self.config)
        self.trainer = StepTrainer(self.backend, estimator, objective, self.config, total_steps, self.critic)  # type: ignore[arg-type]

    def train(self, *groups: SampleGroup, step: int = 1) -> StepResult:
        return self.trainer.train(step, groups)

    def weights(self) -> torch.Tensor:
        return torch.cat([item.detach().flatten().clone() for item in self.policy.masters.tensors.values()])


PPO = {"estimator": {"name": "ppo"}, "critic": {"optimizer": {"learning_rate": 3e-3}}}


def untimed(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if "second" not in name}


def some_groups(count: int, seed: int = 0) -> list[SampleGroup]:
    return [group(seed + number, [0.0, 1.0, 0.5], [2, 4, 3]) for number in range(count)]


def in_two_samples(number: int, rewards: list[float | None]) -> SampleGroup:
    """A group whose second trajectory is two samples: tokens 5 and 6, then tokens 7 and 8 with the first as context."""
    whole, again = group(number, rewards, [4] * len(rewards)), group(number, rewards, [4] * len(rewards))
    first, second = whole.samples[1], again.samples[1]
    first.token_ids, first.loss_mask = first.token_ids[:7], first.loss_mask[:7]
    first.sampler_logprobs = first.sampler_logprobs[:7]
    second.loss_mask[:7] = 0
    second.sample_id = f"e0.{number}/second"
    whole.samples.append(second)
    return whole


class Counting:
    """An estimator that gives each trained token its place in its trajectory, and keeps what it was handed."""

    needs = frozenset({"policy_logprobs", "reference_logprobs", "values"})

    def __init__(self) -> None:
        self.seen: list[list[TrajectoryTokens]] = []

    def token_advantages(self, groups: list[list[TrajectoryTokens]]) -> TokenAdvantages:
        self.seen = groups
        places = [[np.arange(1.0, item.num_tokens + 1) for item in members] for members in groups]
        return TokenAdvantages(
            places, [[item * 10 for item in members] for members in places], 0, [False] * len(groups)
        )


def test_a_token_estimator_gets_the_tokens_in_order_and_its_answer_reaches_them(tiny_model: Path) -> None:
    estimator = Counting()
    subject = Trainer(tiny_model, own=estimator, critic={}, kl_coefficient=0.1)
    trained: list[Group] = []
    assert subject.critic is not None
    subject.critic.values = lambda groups: [[d.token_ids.astype(np.float32) for d in members] for members in groups]
    subject.critic.train = lambda step, groups: trained.extend(groups) or {}
    split = in_two_samples(3, [0.0, 1.0, None])
    subject.train(split)
    first, second, third = estimator.seen[0]
    assert [first.num_tokens, second.num_tokens, third.num_tokens] == [4, 4, 0]
    assert third.reward is None and third.values is not None and third.values.size == 0
    whole = split.samples[3].token_ids
    np.testing.assert_array_equal(second.values, whole[5:9], "the tokens of both samples, in order")
    datums = trained[0]
    assert [list(d.advantages[d.weights != 0]) for d in datums] == [[1, 2, 3, 4], [1, 2], [3, 4]]
    assert [list(d.returns[d.weights != 0]) for d in datums] == [[10, 20, 30, 40], [10, 20], [30, 40]]
    for datum in datums:
        assert not datum.advantages[datum.weights == 0].any() and not datum.returns[datum.weights == 0].any()
    logprobs = subject.policy.forward([datums])[0]
    assert second.policy_logprobs is not None and second.policy_logprobs.shape == (4,) and len(logprobs) == 3
    np.testing.assert_allclose(first.policy_logprobs, first.reference_logprobs, atol=1e-6, err_msg="as loaded")


@given(st.integers(1, 60), st.integers(1, 20))
def test_leftover_groups_are_spread_and_each_is_in_one_update(count: int, updates: int) -> None:
    parts = cuts(count, updates)
    assert [index for part in parts for index in part] == list(range(count))
    assert len(parts) == min(count, updates) and max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("updates", "epochs"), [(1, 1), (2, 1), (3, 2), (9, 2)])
def test_every_group_is_trained_once_an_epoch(tiny_model: Path, updates: int, epochs: int) -> None:
    subject = Trainer(tiny_model, updates_per_step=updates, epochs_per_step=epochs)
    seen: list[list[str]] = []
    original = subject.policy.forward_backward

    def spy(groups: list[Group], *arguments: object) -> object:
        seen.append([members[0].name for members in groups])
        return original(groups, *arguments)  # type: ignore[arg-type]

    subject.policy.forward_backward = spy  # type: ignore[method-assign]
    values = subject.train(*some_groups(5)).values
    parts = min(updates, 5)
    assert values["optimizer_updates"] == len(seen) == parts * epochs
    for epoch in range(epochs):
        names = [name for part in seen[epoch * parts : (epoch + 1) * parts] for name in part]
        assert names == [f"sample e0.{number}/0" for number in range(5)]
    assert values["samples_trained"] == 10, "two of the three of a group have an advantage, however many passes"


def test_what_ratios_are_taken_to_is_fixed_before_the_first_pass(tiny_model: Path) -> None:
    """One update of each of two epochs: the second's ratios are not 1, as behaviour is the policy before both."""
    one = Trainer(tiny_model, behaviour="policy", optimizer={"learning_rate": 1e-2})
    two = Trainer(tiny_model, behaviour="policy", epochs_per_step=2, optimizer={"learning_rate": 1e-2})
    groups = some_groups(3)
    assert one.train(*groups).values["clip_fraction"] == 0
    values = two.train(*groups).values
    assert values["optimizer_updates"] == 2 and values["clip_fraction"] > 0.05


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "reinforce_plus_plus_baseline"])
def test_degenerate_steps_update_nothing(tiny_model: Path, name: str) -> None:
    subject = Trainer(tiny_model, estimator={"name": name}, epochs_per_step=2)
    before = subject.weights()
    for groups, counted in (
        ([group(0, [1.0, 1.0]), group(1, [0.0, 0.0])], {"groups_zero_variance": 2, "groups_without_reward": 0}),
        ([group(0, [None, None])], {"groups_without_reward": 1, "reward_missing": 2, "groups_zero_variance": 0}),
        ([group(0, [100.0, 1.0], [0, 2])], {"groups_zero_variance": 1}),
        ([group(0, [0.0, 1.0], [0, 0])], {"tokens_trained": 0}),
    ):
        values = subject.train(*groups).values
        assert values["optimizer_updates"] == 0 and values["loss"] == 0 and values["samples_trained"] == 0
        assert {key: values[key] for key in counted} == counted
        assert all(np.isfinite(value) for value in values.values())
    assert torch.equal(subject.weights(), before) and subject.policy.updates == 0


def test_a_reward_that_is_not_finite_is_refused_with_its_trajectory(tiny_model: Path) -> None:
    with pytest.raises(InvalidSample, match=r"INVALID_REWARD: group e0\.4: trajectory e0\.4/0 has the reward .*nan"):
        Trainer(tiny_model).train(group(4, [float("nan"), 1.0]))


def test_ppo_trains_policy_and_critic(tiny_model: Path) -> None:
    subject = Trainer(tiny_model, **PPO, epochs_per_step=2)
    first = subject.train(*some_groups(6)).values
    second = subject.train(*some_groups(6), step=2).values
    assert first["optimizer_updates"] == 2 and first["critic_updates"] == 1
    assert first["explained_variance"] == 0 and second["explained_variance"] > 0
    assert second["value_loss"] < first["value_loss"] and first["seconds_critic"] > 0
    assert all(np.isfinite(value) for value in second.values())


def test_where_the_critic_says_nothing_and_rewards_are_equal_only_the_critic_learns(tiny_model: Path) -> None:
    subject = Trainer(tiny_model, **PPO)
    before = subject.weights()
    values = subject.train(group(0, [1.0, 1.0])).values
    assert values["optimizer_updates"] == 0 and values["critic_updates"] == 1
    assert torch.equal(subject.weights(), before)


def test_without_any_reward_neither_learns(tiny_model: Path) -> None:
    subject = Trainer(tiny_model, **PPO)
    values = subject.train(group(0, [None, None]), group(1, [0.0, 1.0], [0, 0])).values
    assert (values["optimizer_updates"], values.get("critic_updates", 0)) == (0, 0)
    assert values["groups_without_reward"] == 1 and all(np.isfinite(value) for value in values.values())


def test_warm_up_trains_the_critic_alone_and_the_schedule_starts_after_it(tiny_model: Path) -> None:
    optimizer = {"learning_rate": 1e-3, "schedule": "linear"}
    subject = Trainer(tiny_model, **{**PPO, "critic": {"warmup_steps": 2}}, optimizer=optimizer)
    before = subject.weights()
    for step in (1, 2):
        values = subject.train(*some_groups(3, step), step=step).values
        assert (values["critic_updates"], values["optimizer_updates"], values["learning_rate"]) == (1, 0, 0.0)
        assert values["logprob_gap_mean"] > 0, "measured all the same"
    assert torch.equal(subject.weights(), before) and subject.policy.updates == 0
    values = subject.train(*some_groups(3, 9), step=3).values
    assert values["optimizer_updates"] == 1 and not torch.equal(subject.weights(), before)
    assert values["learning_rate"] == learning_rate(subject.config.optimizer, 1, 8) == 1e-3


def test_turns_on_the_device_change_no_number(tiny_model: Path) -> None:
    side_by_side = Trainer(tiny_model, **PPO)
    by_turns = Trainer(tiny_model, **{**PPO, "critic": {**PPO["critic"], "offload": True}})
    for step in (1, 2):
        one, other = (item.train(*some_groups(3, step), step=step).values for item in (side_by_side, by_turns))
        assert {k: v for k, v in one.items() if "second" not in k} == {
            k: v for k, v in other.items() if "second" not in k
        }
    assert torch.equal(side_by_side.weights(), by_turns.weights())
    assert by_turns.critic is not None and by_turns.critic.asleep and not by_turns.policy._swap.asleep


def test_a_failure_of_the_critic_leaves_the_policy_awake(tiny_model: Path) -> None:
    subject = Trainer(tiny_model, **{**PPO, "critic": {"offload": True}})

    def fail(step: int, groups: object) -> dict[str, float]:
        raise RuntimeError("out of memory")

    assert subject.critic is not None
    subject.critic.train = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        subject.train(*some_groups(2))
    assert subject.critic.asleep and not subject.policy._swap.asleep


def test_a_resumed_run_with_a_critic_is_the_same_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    through, first, second, policy_only = (Trainer(tiny_model, **PPO) for _ in range(4))
    for subject in (through, first):
        subject.train(*some_groups(3), step=1)
    first.backend.save_state(tmp_path)
    first.backend.finish_save()
    second.backend.load_state(tmp_path)
    policy_only.policy.load_state(tmp_path)
    one, other, without = (item.train(*some_groups(3, 5), step=2).values for item in (through, second, policy_only))
    assert untimed(one) == untimed(other)
    assert torch.equal(through.weights(), second.weights())
    assert without["value_loss"] != one["value_loss"], "a critic that starts anew is another"


def test_the_kl_in_the_reward_counts_once_the_policy_has_left_the_reference(tiny_model: Path) -> None:
    fields = {"optimizer": {"learning_rate": 1e-2}}
    plain = Trainer(tiny_model, estimator={"name": "reinforce_plus_plus"}, **fields)
    held = Trainer(tiny_model, estimator={"name": "reinforce_plus_plus", "kl_coefficient": 2.0}, **fields)
    for step in (1, 2):
        for subject in (plain, held):
            subject.train(*some_groups(3, step), step=step)
        apart = (plain.weights() - held.weights()).abs().max()
        assert apart < 1e-4 if step == 1 else apart > 1e-3


def test_a_critic_and_its_estimator_need_each_other() -> None:
    with pytest.raises(ValueError, match=r"estimator = 'ppo' needs values; add a table \[trainer\.critic\]"):
        TrainerConfig.model_validate({"estimator": {"name": "ppo"}})
    config = TrainerConfig.model_validate({"critic": {}})
    with pytest.raises(ConfigError, match=r"'grpo' uses no values"):
        check_estimator(make_plugin("estimator", config.estimator, "trainer.estimator"), config)
    with pytest.raises(ConfigError, match="needs a critic"):
        check_estimator(Counting(), TrainerConfig())  # type: ignore[arg-type]


def test_collect_and_give_are_inverses() -> None:
    subject = StepGroup.make(in_two_samples(1, [1.0, 0.0]))
    tokens = [np.arange(1.0, 5.0), np.arange(5.0, 9.0)]
    subject.give("advantages", tokens)
    for one, other in zip(subject.collect([d.advantages for d in subject.datums]), tokens, strict=True):
        np.testing.assert_array_equal(one, other)
