"""What KL penalties and distillation do in expectation, summed over every outcome of a small distribution.

The gradient that a penalty has on average over samples is compared with that of the divergence it stands for. A penalty
may estimate the divergence well and still have a gradient of something else, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from services.trainer.losses.base import TokenBatch
from services.trainer.objective import Objective
from services.trainer.penalties.kl import KlKind, kl_estimate

LOGITS = torch.tensor([0.4, -0.3, 0.9, -1.2, 0.1], dtype=torch.float64)
BASE = torch.tensor([-0.2, 0.5, 0.3, -0.4, 0.8], dtype=torch.float64).log_softmax(0)
BEHAVIOUR = torch.tensor([0.1, 0.0, 0.6, -0.9, 0.3], dtype=torch.float64).log_softmax(0)
"""Of an older policy, from which off-policy samples come."""


def expected_gradient(loss: Callable[[Tensor], Tensor], sampler: Tensor) -> Tensor:
    """Gradient by the logits of sum_y sampler(y) loss(y), where loss gives one value an outcome."""
    logits = LOGITS.clone().requires_grad_()
    (sampler.exp() * loss(logits.log_softmax(0))).sum().backward()
    assert logits.grad is not None
    return logits.grad


def divergence_gradient(divergence: Callable[[Tensor], Tensor]) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    divergence(logits.log_softmax(0)).backward()
    assert logits.grad is not None
    return logits.grad


def reverse_kl(policy: Tensor) -> Tensor:
    return (policy.exp() * (policy - BASE)).sum()


def forward_kl(policy: Tensor) -> Tensor:
    return (BASE.exp() * (BASE - policy)).sum()


ON_POLICY = LOGITS.log_softmax(0)
TRUE = divergence_gradient(reverse_kl)


@pytest.mark.parametrize("kind", ["k1", "k3", "low_variance", "unbiased"])
def test_estimates_have_the_value_of_the_kl(kind: KlKind) -> None:
    value = (ON_POLICY.exp() * kl_estimate(ON_POLICY, BASE, kind)).sum()
    assert value.item() == pytest.approx(reverse_kl(ON_POLICY).item(), rel=1e-12)


@pytest.mark.parametrize("sampler", [ON_POLICY, BEHAVIOUR], ids=["on-policy", "off-policy"])
def test_unbiased_has_the_gradient_of_the_kl_on_samples_of_any_policy(sampler: Tensor) -> None:
    gradient = expected_gradient(lambda policy: kl_estimate(policy, BASE, "unbiased", sampler), sampler)
    torch.testing.assert_close(gradient, TRUE, rtol=1e-10, atol=1e-12)
    value = (sampler.exp() * kl_estimate(ON_POLICY, BASE, "unbiased", sampler)).sum()
    assert value.item() == pytest.approx(reverse_kl(ON_POLICY).item(), rel=1e-12)


def test_k1_in_the_loss_has_no_expected_gradient() -> None:
    gradient = expected_gradient(lambda policy: kl_estimate(policy, BASE, "k1"), ON_POLICY)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)
    assert TRUE.abs().max() > 0.1


def test_k2_in_the_loss_has_the_gradient_of_the_kl_on_its_own_samples_only() -> None:
    def k2(policy: Tensor) -> Tensor:
        return kl_estimate(policy, BASE, "k2")

    torch.testing.assert_close(expected_gradient(k2, ON_POLICY), TRUE, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(expected_gradient(k2, BEHAVIOUR), TRUE, rtol=1e-2)


def test_k3_in_the_loss_has_the_gradient_of_the_other_kl() -> None:
    gradient = expected_gradient(lambda policy: kl_estimate(policy, BASE, "k3"), ON_POLICY)
    torch.testing.assert_close(gradient, divergence_gradient(forward_kl), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(gradient, TRUE, rtol=1e-2)


def test_low_variance_is_k3_that_ends_at_ten() -> None:
    base = torch.zeros(3, dtype=torch.float64)
    policy = torch.tensor([-1.0, -3.0, -50.0], dtype=torch.float64)
    found = kl_estimate(policy, base, "low_variance")
    assert found[0] == kl_estimate(policy, base, "k3")[0] and found.tolist()[1:] == [10.0, 10.0]


def outcomes(policy: Tensor, **fields: Tensor) -> TokenBatch:
    """One token for each outcome, weighted with the chance that the policy draws it."""
    zero = torch.zeros_like(ON_POLICY)
    return replace(TokenBatch(policy, ON_POLICY.exp(), zero, ON_POLICY, ON_POLICY), **fields)


def objective_gradient(objective: Objective, fields: Callable[[Tensor], dict[str, Tensor]]) -> Tensor:
    logits = LOGITS.clone().requires_grad_()
    policy = logits.log_softmax(0)
    objective(outcomes(policy, **fields(policy))).total.backward()
    assert logits.grad is not None
    return logits.grad


def test_sampled_distillation_has_the_gradient_of_the_reverse_kl() -> None:
    objective = Objective.from_spec({"loss": {"name": "policy_gradient"}, "distillation": {"mode": "sampled"}})
    gradient = objective_gradient(objective, lambda policy: {"teacher_logprobs": BASE})
    torch.testing.assert_close(gradient, TRUE, rtol=1e-10, atol=1e-12)


def top(policy: Tensor, k: int) -> dict[str, Tensor]:
    """The teacher's k likeliest outcomes, the same at each of the tokens, as all have one context."""
    ids = BASE.topk(k).indices
    rows = torch.ones(len(BASE), 1, dtype=torch.float64)
    return {"policy_topk_logprobs": rows * policy[ids], "teacher_topk_logprobs": rows * BASE[ids]}


def coarse_kl(policy: Tensor, k: int) -> Tensor:
    """KL over the k outcomes and all others as one."""
    ids = BASE.topk(k).indices
    rest = [1 - item.exp()[ids].sum() for item in (policy, BASE)]
    return (policy.exp() * (policy - BASE))[ids].sum() + rest[0] * (rest[0] / rest[1]).log()


@pytest.mark.parametrize("k", [1, 3, 4])
def test_topk_divergence_in_the_loss_has_an_expected_gradient(k: int) -> None:
    objective = Objective.from_spec({"loss": {"name": "policy_gradient"}, "distillation": {"mode": "topk", "k": k}})
    gradient = objective_gradient(objective, lambda policy: top(policy, k))
    torch.testing.assert_close(gradient, divergence_gradient(lambda policy: coarse_kl(policy, k)), rtol=1e-9, atol=1e-9)
    assert gradient.abs().max() > 0.01
    if k == len(BASE) - 1:
        torch.testing.assert_close(gradient, TRUE, rtol=1e-9, atol=1e-9)


def test_topk_divergence_as_a_detached_penalty_has_none() -> None:
    """Taken off the advantage of whichever token was drawn: it does not depend on that token, so it cancels out."""
    penalty = coarse_kl(ON_POLICY, 3).detach()
    gradient = expected_gradient(lambda policy: penalty * (policy - ON_POLICY).exp(), ON_POLICY)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)
    assert penalty > 0.05
