"""The torch backend against plain transformers: log-probabilities, gradients, packing, micro-batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from tiny_policies import make_groups

from paceline.config.trainer import LoraConfig, TrainerConfig
from services.trainer.backends.torch import TorchBackend
from services.trainer.datum import Datum
from services.trainer.losses.cross_entropy import CrossEntropy
from services.trainer.losses.policy_gradient import PolicyGradient
from services.trainer.losses.ppo import Ppo
from services.trainer.objective import Objective

LENGTHS = [[3, 1, 7, 5], [2, 2], [9, 4, 6], [1, 12]]
PROMPTS = [6, 11, 3, 8]
PPO = Objective(Ppo(Ppo.Options()))


def backend(path: Path, dtype: str = "float64", share: bool = True, **fields: object) -> TorchBackend:
    return TorchBackend(path, TrainerConfig.model_validate(fields), 0, share_prefix=share, dtype=dtype)


def plain_logprobs(path: Path, datum: Datum, dtype: torch.dtype) -> np.ndarray:
    """Log-probabilities of one sequence alone, by transformers, softmax in the model's type."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    ids = torch.from_numpy(datum.token_ids.astype(np.int64)).unsqueeze(0)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1] / datum.temperature
    chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    return np.concatenate([[0.0], chosen.double().numpy()])


def gradients(subject: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: item.grad.clone() for name, item in subject.masters.tensors.items() if item.grad is not None}


def relative(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    difference = torch.stack([(found[name] - wanted[name]).double().norm() for name in wanted]).norm()
    return float(difference / torch.stack([item.double().norm() for item in wanted.values()]).norm())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("share", [True, False])
def test_forward_equals_transformers_on_each_sample_alone(tiny_model: Path, share: bool, temperature: float) -> None:
    groups = make_groups(LENGTHS, PROMPTS, temperature=temperature)
    found = backend(tiny_model, "float32", share, tokens_per_micro_batch=60).forward(groups)
    for group, values in zip(groups, found, strict=True):
        for datum, logprobs in zip(group, values, strict=True):
            np.testing.assert_allclose(logprobs, plain_logprobs(tiny_model, datum, torch.float32), atol=1e-4)


def test_a_group_without_a_common_prefix_is_padded_and_still_right(tiny_model: Path) -> None:
    first, second = make_groups([[4], [6]], [5, 9])
    (values,) = backend(tiny_model).forward([[first[0], second[0]]])
    for datum, logprobs in zip([first[0], second[0]], values, strict=True):
        np.testing.assert_allclose(logprobs, plain_logprobs(tiny_model, datum, torch.float64), atol=1e-6)


def test_a_sample_cannot_see_its_siblings(tiny_model: Path) -> None:
    groups = make_groups([[5, 5, 5]], [8])
    subject = backend(tiny_model)
    before = subject.forward(groups)[0]
    groups[0][1].token_ids = groups[0][1].token_ids.copy()
    groups[0][1].token_ids[8:] = 3
    after = subject.forward(groups)[0]
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[2], after[2])
    assert not np.array_equal(before[1], after[1])


@pytest.mark.parametrize("model", ["tiny_model", "tied_model"])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_gradient_equals_autograd_through_transformers(
    model: str, lora: LoraConfig | None, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    groups = make_groups(LENGTHS, PROMPTS)
    subject = backend(path, lora=lora)
    subject.forward_backward(groups, Objective(CrossEntropy(CrossEntropy.Options())))
    found = gradients(subject)
    reference = backend(path, lora=lora)
    for datum in [datum for group in groups for datum in group]:
        ids = torch.from_numpy(datum.token_ids.astype(np.int64)).unsqueeze(0)
        logits = reference.policy.model(input_ids=ids).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        (-(chosen * torch.from_numpy(datum.weights[1:])).sum()).backward()
    assert relative(found, gradients(reference)) < 1e-6


@pytest.mark.parametrize("budget", [1, 40, 75, 4096])
@pytest.mark.parametrize("share", [True, False])
def test_gradient_does_not_depend_on_micro_batches(tiny_model: Path, share: bool, budget: int) -> None:
    groups = make_groups(LENGTHS, PROMPTS)
    wanted = backend(tiny_model, "float32", False, tokens_per_micro_batch=100_000)
    expected = wanted.forward_backward(groups, PPO)
    subject = backend(tiny_model, "float32", share, tokens_per_micro_batch=budget)
    result = subject.forward_backward(groups, PPO)
    assert relative(gradients(subject), gradients(wanted)) < 1e-5
    assert result.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
    assert result.metrics == pytest.approx(expected.metrics, rel=1e-5)


def test_masked_tokens_have_no_gradient_whatever_they_hold(tiny_model: Path) -> None:
    groups = make_groups([[4, 4]], [5])
    loss = Objective(PolicyGradient(PolicyGradient.Options(importance_ratio=False)))
    subject = backend(tiny_model)
    subject.forward_backward(groups, loss)
    expected = gradients(subject)
    for datum in groups[0]:
        datum.advantages = np.where(datum.weights != 0, datum.advantages, 1e30).astype(np.float32)
    again = backend(tiny_model)
    again.forward_backward(groups, loss, every_token=True)
    assert relative(gradients(again), expected) < 1e-9


def test_a_pass_without_weights_leaves_no_gradient(tiny_model: Path) -> None:
    groups = make_groups([[4, 4]], [5])
    for datum in groups[0]:
        datum.weights = np.zeros_like(datum.weights)
    subject = backend(tiny_model)
    result = subject.forward_backward(groups, PPO)
    assert (result.loss_sum, result.num_tokens) == (0.0, 0)
    assert not subject.optim_step(1.0, 1e-3).stepped


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_model: Path) -> None:
    subject = backend(tiny_model)
    before = {name: item.detach().clone() for name, item in subject.masters.tensors.items()}
    groups = make_groups([[4, 4]], [5])
    for datum in groups[0]:
        datum.advantages = np.full_like(datum.advantages, 1e38)
    subject.forward_backward(groups, Objective(Ppo(Ppo.Options())))
    for item in subject.masters.tensors.values():
        assert item.grad is not None
        item.grad.fill_(float("nan"))
    assert not subject.optim_step(1.0, 1e-3).stepped
    assert all(torch.equal(item, before[name]) for name, item in subject.masters.tensors.items())
    assert not subject.masters.pending


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_in_a_stream_equal_padded_rows(tiny_model: Path, share: bool, dtype: str) -> None:
    groups = make_groups([*LENGTHS, [140, 150], [160]], [*PROMPTS, 9, 30])
    stream, padded = (backend(tiny_model, dtype, share, tokens_per_micro_batch=300) for _ in range(2))
    assert stream.policy.streams
    padded.policy.streams = False
    found, wanted = (subject.forward_backward(groups, PPO) for subject in (stream, padded))
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    assert relative(gradients(stream), gradients(padded)) < tolerance
    assert found.loss_sum == pytest.approx(wanted.loss_sum, rel=tolerance)


def test_activation_checkpointing_in_a_stream(tiny_model: Path) -> None:
    groups = make_groups(LENGTHS, PROMPTS)
    plain, recomputed = backend(tiny_model), backend(tiny_model, parallel={"activation_checkpointing": True})
    for subject in (plain, recomputed):
        subject.forward_backward(groups, PPO)
    assert relative(gradients(recomputed), gradients(plain)) == 0.0
