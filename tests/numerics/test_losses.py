"""Every loss, KL and correction in float64 against a loop that is written out, and against numerical gradients."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.plugins import registry
from services.trainer.corrections.tis import Tis
from services.trainer.kl import kl_estimate
from services.trainer.losses.base import LossSums, TokenBatch
from services.trainer.losses.cross_entropy import CrossEntropy
from services.trainer.losses.policy_gradient import PolicyGradient
from services.trainer.losses.ppo import Ppo
from services.trainer.objective import Objective

COUNT = 24
LOSSES: dict[str, Callable[[TokenBatch], LossSums]] = {
    "ppo": Ppo(Ppo.Options(clip_low=0.2, clip_high=0.28)),
    "ppo dual clip": Ppo(Ppo.Options(dual_clip=3.0)),
    "policy_gradient": PolicyGradient(PolicyGradient.Options()),
    "policy_gradient without ratio": PolicyGradient(PolicyGradient.Options(importance_ratio=False)),
    "cross_entropy": CrossEntropy(CrossEntropy.Options()),
    "ppo with kl": Objective(Ppo(Ppo.Options()), kl_coefficient=0.1, kl_kind="k3"),
    "ppo with tis": Objective(Ppo(Ppo.Options()), corrections=[Tis(Tis.Options())]),
}


def batch(seed: int = 0) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return torch.randn(COUNT, generator=generator, dtype=torch.float64) * scale + shift

    behaviour = normal(0.5, -2.0)
    weights = torch.rand(COUNT, generator=generator, dtype=torch.float64)
    weights[::5] = 0.0
    return TokenBatch(
        policy_logprobs=(behaviour + normal(0.4)).requires_grad_(), weights=weights, advantages=normal(),
        sampler_logprobs=behaviour + normal(0.3), behaviour_logprobs=behaviour,
        reference_logprobs=behaviour + normal(0.3),
    )  # fmt: skip


def written_out(name: str, b: TokenBatch) -> float:
    total = 0.0
    for t in range(COUNT):
        w, a = b.weights[t].item(), b.advantages[t].item()
        p, old = b.policy_logprobs[t].item(), b.behaviour_logprobs[t].item()
        assert b.reference_logprobs is not None
        if w == 0:
            continue
        ratio = math.exp(p - old)
        low, high = (0.2, 0.28) if name == "ppo" else (0.2, 0.2)
        ppo = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
        if name == "ppo dual clip" and a < 0:
            ppo = min(ppo, -3.0 * a)
        x = p - b.reference_logprobs[t].item()
        total += (
            w
            * {
                "ppo": ppo,
                "ppo dual clip": ppo,
                "policy_gradient": -ratio * a,
                "policy_gradient without ratio": -p * a,
                "cross_entropy": -p,
                "ppo with kl": ppo + 0.1 * (math.exp(-x) - 1 + x),
                "ppo with tis": ppo * min(math.exp(old - b.sampler_logprobs[t].item()), 2.0),
            }[name]
        )
    return total


@pytest.mark.parametrize("name", LOSSES)
def test_value_is_as_written_out(name: str) -> None:
    for seed in range(3):
        assert LOSSES[name](batch(seed)).total.item() == pytest.approx(written_out(name, batch(seed)), rel=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_the_value(name: str) -> None:
    b = batch()

    def value(policy: Tensor) -> Tensor:
        return LOSSES[name](
            TokenBatch(policy, b.weights, b.advantages, b.sampler_logprobs, b.behaviour_logprobs, b.reference_logprobs)
        ).total

    assert torch.autograd.gradcheck(value, (b.policy_logprobs,))


@pytest.mark.parametrize("name", LOSSES)
def test_masked_tokens_never_poison(name: str) -> None:
    clean, dirty = batch(), batch()
    masked = clean.weights == 0
    with torch.no_grad():
        for field in ("policy_logprobs", "advantages", "sampler_logprobs", "behaviour_logprobs", "reference_logprobs"):
            values = getattr(dirty, field)
            values[masked] = torch.tensor([math.nan, math.inf, -math.inf, math.nan, 1e300], dtype=torch.float64)
    one, other = LOSSES[name](clean), LOSSES[name](dirty)
    assert one.total.item() == other.total.item()
    one.total.backward()
    other.total.backward()
    assert clean.policy_logprobs.grad is not None and dirty.policy_logprobs.grad is not None
    assert torch.equal(clean.policy_logprobs.grad, dirty.policy_logprobs.grad)
    assert not dirty.policy_logprobs.grad[masked].any()
    for key, value in other.metrics.items():
        assert math.isfinite(float(value)), key


@pytest.mark.parametrize("name", LOSSES)
def test_a_sum_over_parts_is_the_sum_over_all(name: str) -> None:
    b = batch()
    whole = LOSSES[name](b)
    parts = []
    for part in (slice(0, 7), slice(7, COUNT)):
        assert b.reference_logprobs is not None
        fields = (b.policy_logprobs, b.weights, b.advantages, b.sampler_logprobs, b.behaviour_logprobs)
        parts.append(LOSSES[name](TokenBatch(*(item[part] for item in fields), b.reference_logprobs[part])))
    assert sum(item.total.item() for item in parts) == pytest.approx(whole.total.item(), rel=1e-12)
    for key, value in whole.metrics.items():
        combine = max if key.endswith("_max") else sum
        assert combine(float(item.metrics[key]) for item in parts) == pytest.approx(float(value), rel=1e-12)


def test_an_extreme_ratio_stays_finite() -> None:
    b = batch()
    with torch.no_grad():
        b.policy_logprobs[:] = 0.0
        b.behaviour_logprobs[:] = -1000.0
    total = PolicyGradient(PolicyGradient.Options())(b).total
    assert total.isfinite()
    assert abs(total.item()) <= math.exp(20) * float((b.weights * b.advantages).abs().sum()) * 1.0001


def test_clip_fraction_counts_active_clips_only() -> None:
    one = torch.ones(4, dtype=torch.float64)
    ratio = torch.tensor([1.5, 0.5, 1.5, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    b = TokenBatch(ratio.log(), one, advantages, one * 0, one * 0)
    assert float(Ppo(Ppo.Options())(b).metrics["clip_fraction"]) == 1


def test_kl_estimates_are_unbiased_or_exact_where_they_should_be() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64).log()
    base = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    exact = (policy.exp() * (policy - base)).sum()
    for kind in ("k1", "k3"):
        estimate = (policy.exp() * kl_estimate(policy, base, kind)).sum()
        assert estimate.item() == pytest.approx(exact.item(), rel=1e-12)
    assert (kl_estimate(policy, base, "k3") >= 0).all()
    torch.testing.assert_close(kl_estimate(policy, base, "k2"), (policy - base) ** 2 / 2)


def test_truncated_importance_weights_have_no_gradient() -> None:
    behaviour = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(3, dtype=torch.float64)
    weights = Tis(Tis.Options())(TokenBatch(zero, zero + 1, zero, zero, behaviour))
    assert weights.tolist() == pytest.approx([1.0, 2.0, math.exp(-2)])
    assert not weights.requires_grad


@pytest.mark.parametrize("name", registry("loss").available())
def test_every_registered_loss_conforms(name: str) -> None:
    """New losses are covered by being there: defaults, a scalar sum with a gradient, nothing from masked tokens."""
    plugin = registry("loss").load(name)
    b = batch()
    sums = plugin(plugin.Options())(b)
    assert sums.total.shape == ()
    sums.total.backward()
    assert b.policy_logprobs.grad is not None and b.policy_logprobs.grad.isfinite().all()
    assert not b.policy_logprobs.grad[b.weights == 0].any()
