"""One training step from groups to numbers: degenerate batches, invariance to batching, and what each option means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_policies import VOCABULARY

from paceline.api.common.v1 import reward_pb2
from paceline.config.trainer import TrainerConfig
from paceline.samples import COMPLETED, FAILED, TRUNCATED, InvalidSample, Sample, SampleGroup
from services.trainer.algorithms.grpo import Grpo
from services.trainer.backends.torch import TorchBackend
from services.trainer.objective import Objective
from services.trainer.step.data import StepGroup
from services.trainer.step.step_trainer import StepResult, StepTrainer

MISSING = reward_pb2.Reward(missing=reward_pb2.MissingReward(reason=reward_pb2.MISSING_REASON_GRADER_ERROR))


def group(
    number: int, rewards: list[float | None], lengths: list[int] | None = None, status: int = COMPLETED
) -> SampleGroup:
    """A group of random samples; a length of 0 is a sample in which nothing was sampled."""
    random = np.random.default_rng(number)
    prompt = random.integers(2, VOCABULARY, 5)
    samples = []
    for sibling, reward in enumerate(rewards):
        length = (lengths or [3] * len(rewards))[sibling]
        mask = np.array([0] * 5 + [1] * length, np.uint8)
        ids = np.concatenate([prompt, random.integers(2, VOCABULARY, length)]).astype(np.int32)
        name = f"e0.{number}/{sibling}"
        sample = Sample(
            name, name, ids, mask, (-3.9 * mask).astype(np.float32), [(1, length)], status, 1.0,
            reward=MISSING if reward is None else reward_pb2.Reward(value=reward),
        )  # fmt: skip
        samples.append(sample)
    return SampleGroup("run", f"e0.{number}", 1, samples)


class Stepper:
    """A step trainer on a fresh tiny policy."""

    def __init__(self, path: Path, dtype: str = "float32", **fields: object) -> None:
        config = TrainerConfig.model_validate(fields)
        self.backend = TorchBackend(path, config, 0, dtype=dtype)
        objective = Objective.from_config(config)
        self._trainer = StepTrainer(self.backend, Grpo(Grpo.Options()), objective, config, 10)

    def train(self, *groups: SampleGroup, step: int = 1) -> StepResult:
        return self._trainer.train(step, groups)

    def weights(self) -> torch.Tensor:
        return torch.cat([item.detach().flatten().clone() for item in self.backend.masters.tensors.values()])


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([group(0, [1.0, 1.0]), group(1, [0.0, 0.0])], {"groups_zero_variance": 2, "reward_missing": 0}),
        ([group(0, [None, None])], {"groups_without_reward": 1, "groups_zero_variance": 0, "reward_missing": 2}),
        ([group(0, [0.0, 1.0], [0, 0])], {"groups_zero_variance": 1, "tokens_trained": 0}),
        ([group(0, [100.0, 1.0], [0, 2])], {"groups_zero_variance": 1, "samples_trained": 0}),
        ([group(0, [0.0, 1.0], status=FAILED)], {"groups_zero_variance": 1}),
        ([group(0, [5.0])], {"groups_zero_variance": 1, "reward_mean": 5.0}),
    ],
)
def test_where_nothing_contributes_nothing_is_updated(
    tiny_model: Path, groups: list[SampleGroup], expected: dict[str, float]
) -> None:
    subject = Stepper(tiny_model)
    before = subject.weights()
    values = subject.train(*groups).values
    assert values["optimizer_updates"] == 0 and values["loss"] == 0.0
    assert torch.equal(subject.weights(), before) and subject.backend.updates == 0
    assert {name: values[name] for name in expected} == expected
    assert all(np.isfinite(value) for value in values.values())


def test_a_missing_reward_is_not_a_zero(tiny_model: Path) -> None:
    with_missing, without = Stepper(tiny_model), Stepper(tiny_model)
    three = group(0, [None, 1.0, 3.0])
    two = group(0, [None, 1.0, 3.0])
    del two.samples[0]
    values = with_missing.train(three).values
    without.train(two)
    assert values["reward_mean"] == 2.0 and values["reward_missing"] == 1
    torch.testing.assert_close(with_missing.weights(), without.weights(), rtol=0, atol=1e-6)


def test_a_gap_is_measured_even_when_nothing_is_trained(tiny_model: Path) -> None:
    values = Stepper(tiny_model).train(group(0, [1.0, 1.0])).values
    assert values["logprob_gap_mean"] > 0.1 and 0 < values["effective_sample_size"] <= 1


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_numbers_do_not_depend_on_micro_batches(tiny_model: Path, aggregation: str) -> None:
    lengths, rewards = [1, 2, 3, 50, 5, 5, 5, 9], [0.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    groups = [group(n, list(rewards[2 * n : 2 * n + 2]), lengths[2 * n : 2 * n + 2]) for n in range(4)]
    found = []
    for budget in (1, 30, 4096):
        subject = Stepper(
            tiny_model, "float64", aggregation=aggregation, tokens_per_micro_batch=budget, kl_coefficient=0.01
        )
        values = subject.train(*groups).values
        found.append({name: value for name, value in values.items() if "second" not in name})
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5, abs=1e-9)
    assert found[0]["grad_norm"] > 0 and found[0]["kl_reference"] == pytest.approx(0, abs=1e-6)


def test_order_of_arrival_changes_nothing(tiny_model: Path) -> None:
    groups = [group(number, [0.0, 1.0]) for number in (2, 10, 1)]
    one, other = Stepper(tiny_model), Stepper(tiny_model)
    one.train(*groups)
    other.train(*reversed(groups))
    assert torch.equal(one.weights(), other.weights())


def test_a_trajectory_in_several_samples_weighs_as_one(tiny_model: Path) -> None:
    whole = group(0, [0.0, 1.0], [4, 4])
    split = group(0, [0.0, 1.0], [4, 4])
    first = split.samples[1]
    second = group(0, [0.0, 1.0], [4, 4]).samples[1]
    first.loss_mask[7:] = 0
    second.loss_mask[:7] = 0
    second.sample_id = "e0.0/2"
    split.samples.append(second)
    one, other = (
        Stepper(tiny_model, aggregation="seq_mean_token_mean"),
        Stepper(tiny_model, aggregation="seq_mean_token_mean"),
    )
    values = one.train(whole).values
    assert other.train(split).values["loss"] == pytest.approx(values["loss"], rel=1e-5, abs=1e-7)
    torch.testing.assert_close(one.weights(), other.weights(), rtol=0, atol=1e-6)


def test_samples_of_a_trajectory_must_agree_on_its_reward(tiny_model: Path) -> None:
    bad = group(3, [0.0, 1.0])
    bad.samples[1].trajectory_id = bad.samples[0].trajectory_id
    with pytest.raises(InvalidSample, match=r"e0\.3.*different rewards"):
        Stepper(tiny_model).train(bad)


@pytest.mark.parametrize("behaviour", ["sampler", "policy"])
def test_several_updates_a_step(tiny_model: Path, behaviour: str) -> None:
    subject = Stepper(tiny_model, behaviour=behaviour, updates_per_step=2)
    once = Stepper(tiny_model, behaviour=behaviour)
    groups = [group(number, [0.0, 1.0, 0.5]) for number in range(4)]
    values, reference = subject.train(*groups).values, once.train(*groups).values
    assert (values["optimizer_updates"], reference["optimizer_updates"]) == (2, 1)
    assert subject.backend.updates == 2
    if behaviour == "policy":
        assert values["logprob_gap_mean"] == pytest.approx(reference["logprob_gap_mean"], rel=1e-6)
        assert reference["loss"] == pytest.approx(0.0, abs=1e-6), "ratios are 1, advantages of a group sum to 0"


def test_truncated_importance_sampling_changes_the_update(tiny_model: Path) -> None:
    plain = Stepper(tiny_model, behaviour="policy")
    corrected = Stepper(tiny_model, behaviour="policy", corrections=[{"name": "tis", "clip": 1.5}])
    groups = [group(number, [0.0, 1.0, 0.5]) for number in range(2)]
    assert plain.train(*groups).values["grad_norm"] != corrected.train(*groups).values["grad_norm"]


def test_a_wrong_temperature_shows_in_the_gap(tiny_model: Path) -> None:
    measured = group(0, [0.0, 1.0, 0.5])
    subject = Stepper(tiny_model)
    datums = StepGroup.make(measured).datums
    for sample, logprobs in zip(measured.samples, subject.backend.forward([datums])[0], strict=True):
        sample.sampler_logprobs = logprobs * sample.loss_mask
    assert Stepper(tiny_model).train(measured).values["logprob_gap_max"] < 1e-4
    for sample in measured.samples:
        sample.temperature = 0.5
    assert Stepper(tiny_model).train(measured).values["logprob_gap_mean"] > 0.1


def test_description_of_a_step(tiny_model: Path) -> None:
    values = (
        Stepper(tiny_model).train(group(0, [0.0, 1.0], [2, 4]), group(1, [1.0, 1.0], [3, 3], status=TRUNCATED)).values
    )
    expected = {
        "reward_mean": 0.75, "groups_trained": 2, "groups_zero_variance": 1, "samples_trained": 2,
        "tokens_trained": 12, "response_length_mean": 3.0, "truncated_fraction": 0.5, "optimizer_updates": 1,
        "learning_rate": 1e-5,
    }  # fmt: skip
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert values["entropy"] > 0 and values["grad_norm"] > 0 and 0 <= values["clip_fraction"] <= 1


def test_corrections_are_in_the_record(tiny_model: Path) -> None:
    corrections = [{"name": "icepop", "lower": 0.8, "upper": 1.25}]
    stepper = Stepper(tiny_model, behaviour="policy", corrections=corrections)
    values = stepper.train(group(0, [1.0, 0.0], [6, 6]), group(1, [1.0, 0.0], [6, 6])).values
    assert 0 < values["correction_rejected_fraction"] <= 1
    assert values["correction_weight_max"] <= 1.25
    assert values.get("correction_sample_size", 0.0) <= 1


def test_a_group_is_distilled_from_the_teacher_that_its_record_names(tiny_model: Path, tied_model: Path) -> None:
    fields = {
        "distillation": {"mode": "topk", "k": 4},
        "teachers": {"default": {"path": str(tiny_model)}, "other": {"path": str(tied_model)}},
    }
    found = {}
    for metadata in ("{}", '{"teacher": "other"}'):
        equal = group(0, [1.0, 1.0], [3, 4])
        equal.metadata_json = metadata
        found[metadata] = Stepper(tiny_model, **fields).train(equal).values
    assert [item["optimizer_updates"] for item in found.values()] == [1, 1], "zero advantages are no reason to skip it"
    own, other = (item["distillation_kl"] for item in found.values())
    assert abs(own) < 1e-5 < other


def test_a_constant_denominator_is_the_same_whatever_the_lengths(tiny_model: Path) -> None:
    stepper = Stepper(tiny_model, aggregation="constant", aggregation_length=16, loss={"name": "importance_sampling"})
    values = stepper.train(group(0, [1.0, 0.0], [3, 3])).values
    total = Stepper(tiny_model, aggregation="seq_mean_token_sum", loss={"name": "importance_sampling"})
    expected = total.train(group(0, [1.0, 0.0], [3, 3])).values
    assert values["loss"] == pytest.approx(expected["loss"] / 16, rel=1e-6)
    assert values["grad_norm"] == pytest.approx(expected["grad_norm"] / 16, rel=1e-5)
