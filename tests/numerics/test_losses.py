"""Every loss in float64: value and gradient against loops that are written out from the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from token_batches import GROUPS, LENGTHS, make_batch

from paceline.config import ConfigError
from services.trainer.critic.value_loss import clipped_value_loss
from services.trainer.losses.base import TokenBatch
from services.trainer.losses.dpo import Dpo
from services.trainer.losses.policy_gradient import PolicyGradient
from services.trainer.losses.ppo import Ppo
from services.trainer.objective import Objective


@dataclass
class Token:
    """One unmasked token as plain numbers."""

    place: int
    sequence: int
    w: float
    a: float
    p: float
    q: float
    ref: float

    @property
    def r(self) -> float:
        return math.exp(self.p - self.q)


Result = tuple[float, dict[int, float]]
"""A sum, and its derivative by the policy's log-probability of each token."""


def tokens_of(batch: TokenBatch) -> list[Token]:
    assert batch.reference_logprobs is not None
    columns = (batch.sequences, batch.weights, batch.advantages, batch.policy_logprobs, batch.behaviour_logprobs)
    rows = zip(*(item.tolist() for item in (*columns, batch.reference_logprobs)), strict=True)
    return [Token(place, *row) for place, row in enumerate(rows) if row[1] != 0]


def by_token(tokens: Sequence[Token], one: Callable[[Token], tuple[float, float]]) -> Result:
    """`one` gives loss and derivative of a token, both without the weight."""
    results = {token.place: (token.w, *one(token)) for token in tokens}
    return sum(w * loss for w, loss, _ in results.values()), {place: w * d for place, (w, _, d) in results.items()}


def clipped(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> tuple[float, bool]:
    """Loss of one ratio, and whether it moves with the ratio."""
    plain, bounded = -ratio * advantage, -min(max(ratio, low), high) * advantage
    loss, moves = (plain, True) if plain >= bounded else (bounded, False)
    if dual is not None and advantage < 0 and loss > -dual * advantage:
        return -dual * advantage, False
    return loss, moves


def ppo(tokens: Sequence[Token], low: float = 0.8, high: float = 1.2, dual: float | None = None) -> Result:
    def one(token: Token) -> tuple[float, float]:
        loss, moves = clipped(token.r, token.a, low, high, dual)
        return loss, -token.r * token.a if moves else 0.0

    return by_token(tokens, one)


def policy_gradient(tokens: Sequence[Token]) -> Result:
    return by_token(tokens, lambda token: (-token.r * token.a, -token.r * token.a))


def cispo(tokens: Sequence[Token], low: float = 0.0, high: float = 4.0) -> Result:
    def one(token: Token) -> tuple[float, float]:
        factor = min(max(token.r, low), high)
        return -factor * token.a * token.p, -factor * token.a

    return by_token(tokens, one)


def dro(tokens: Sequence[Token], beta: float) -> Result:
    def one(token: Token) -> tuple[float, float]:
        distance = token.p - token.q
        return -(token.a * token.p - beta / 2 * distance**2), -token.a + beta * distance

    return by_token(tokens, one)


def gspo(tokens: Sequence[Token], low: float, high: float) -> Result:
    total, gradient = 0.0, {}
    for sequence in range(len(LENGTHS)):
        own = [token for token in tokens if token.sequence == sequence]
        ratio = math.exp(sum(token.p - token.q for token in own) / len(own))
        by_ratio = 0.0
        for token in own:
            loss, moves = clipped(ratio, token.a, low, high)
            total += token.w * loss
            by_ratio += -token.w * token.a if moves else 0.0
        gradient |= {token.place: by_ratio * ratio / len(own) for token in own}
    return total, gradient


def gspo_token(tokens: Sequence[Token], low: float, high: float) -> Result:
    total, gradient = 0.0, {}
    for sequence in range(len(LENGTHS)):
        own = [token for token in tokens if token.sequence == sequence]
        ratio = math.exp(sum(token.p - token.q for token in own) / len(own))
        for token in own:
            loss, moves = clipped(ratio, token.a, low, high)
            total += token.w * loss
            gradient[token.place] = -token.w * token.a * ratio if moves else 0.0
    return total, gradient


def dpo(tokens: Sequence[Token], beta: float = 0.1, smoothing: float = 0.0) -> Result:
    sequences = range(len(LENGTHS))
    own = [[token for token in tokens if token.sequence == number] for number in sequences]
    score = [sum(token.p - token.ref for token in items) for items in own]
    side = [sum(token.a for token in items) for items in own]
    weight = [sum(token.w for token in items) / len(items) for items in own]
    rivals = [[j for j in sequences if GROUPS[i] == GROUPS[j] and side[i] * side[j] < 0] for i in sequences]
    total, by_score = 0.0, [0.0] * len(LENGTHS)
    for i in sequences:
        for j in rivals[i]:
            chosen, rejected = (i, j) if side[i] > 0 else (j, i)
            margin = beta * (score[chosen] - score[rejected])
            sigmoid = 1 / (1 + math.exp(-margin))
            loss = -(1 - smoothing) * math.log(sigmoid) - smoothing * math.log(1 - sigmoid)
            share = weight[i] / len(rivals[i])
            total += share * loss
            slope = share * beta * (sigmoid - 1 + smoothing)
            by_score[chosen] += slope
            by_score[rejected] -= slope
    return total, {token.place: by_score[token.sequence] for token in tokens}


CASES: dict[str, tuple[dict[str, object], Callable[[Sequence[Token]], Result]]] = {
    "ppo": ({"name": "ppo"}, ppo),
    "ppo, two bounds": ({"name": "ppo", "clip_high": 0.28}, lambda t: ppo(t, 0.8, 1.28)),
    "ppo, dual clip": ({"name": "ppo", "dual_clip": 1.3}, lambda t: ppo(t, dual=1.3)),
    "ppo, absolute": ({"name": "ppo", "ratio_low": 0.5, "ratio_high": 1.1}, lambda t: ppo(t, 0.5, 1.1)),
    "policy_gradient": ({"name": "policy_gradient"}, policy_gradient),
    "no ratio": (
        {"name": "policy_gradient", "importance_ratio": False}, lambda t: by_token(t, lambda x: (-x.p * x.a, -x.a))
    ),
    "importance_sampling": ({"name": "importance_sampling"}, policy_gradient),
    "cross_entropy": ({"name": "cross_entropy"}, lambda t: by_token(t, lambda x: (-x.p, -1.0))),
    "cispo": ({"name": "cispo"}, cispo),
    "cispo, absolute": ({"name": "cispo", "ratio_low": 0.9, "ratio_high": 1.2}, lambda t: cispo(t, 0.9, 1.2)),
    "cispo, epsilons": ({"name": "cispo", "clip_low": 0.1, "clip_high": 0.2}, lambda t: cispo(t, 0.9, 1.2)),
    "dro": ({"name": "dro", "beta": 0.4}, lambda t: dro(t, 0.4)),
    "gspo": ({"name": "gspo"}, lambda t: gspo(t, 1 - 3e-4, 1 + 4e-4)),
    "gspo, wide": ({"name": "gspo", "clip_low": 0.2, "clip_high": 0.2}, lambda t: gspo(t, 0.8, 1.2)),
    "gspo, token": (
        {"name": "gspo", "form": "token", "clip_low": 0.2, "clip_high": 0.2}, lambda t: gspo_token(t, 0.8, 1.2)
    ),
    "dpo": ({"name": "dpo"}, dpo),
    "dpo, smoothed": ({"name": "dpo", "beta": 0.8, "label_smoothing": 0.2}, lambda t: dpo(t, 0.8, 0.2)),
}  # fmt: skip


def loss_of(table: dict[str, object]) -> Objective:
    return Objective.from_spec({"loss": table})


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("token_advantages", [False, True])
def test_value_and_gradient_are_as_written_out(case: str, token_advantages: bool) -> None:
    table, reference = CASES[case]
    for seed in range(4):
        batch = make_batch(seed, token_advantages)
        total = loss_of(table)(batch).total
        value, gradient = reference(tokens_of(batch))
        assert total.item() == pytest.approx(value, rel=1e-10)
        total.backward()
        expected = torch.zeros_like(batch.weights)
        for place, slope in gradient.items():
            expected[place] = slope
        torch.testing.assert_close(batch.policy_logprobs.grad, expected, rtol=1e-9, atol=1e-12)


SMOOTH = ("policy_gradient", "no ratio", "cross_entropy", "dro", "dpo", "dpo, smoothed", "ppo", "gspo, wide")


@pytest.mark.parametrize("case", SMOOTH)
def test_gradcheck(case: str) -> None:
    batch = make_batch(5)
    loss = loss_of(CASES[case][0])
    assert torch.autograd.gradcheck(
        lambda policy: loss(replace(batch, policy_logprobs=policy)).total, (batch.policy_logprobs,)
    )


def test_gspo_forms_agree_where_advantage_and_weight_are_constant_on_a_sequence() -> None:
    found = []
    for form in ("sequence", "token"):
        batch = make_batch(6)
        batch.weights = (batch.weights != 0).double()
        total = loss_of({"name": "gspo", "form": form, "clip_low": 0.2, "clip_high": 0.2})(batch).total
        total.backward()
        found.append((total.item(), batch.policy_logprobs.grad))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-10, atol=1e-12)


def test_cross_entropy_passes_any_gradient_a_client_asks_for() -> None:
    batch = make_batch()
    batch.weights = batch.weights * torch.where(torch.arange(len(batch.weights)) % 2 == 0, 1.0, -3.0)
    loss_of({"name": "cross_entropy"})(batch).total.backward()
    torch.testing.assert_close(batch.policy_logprobs.grad, -batch.weights)


def test_dpo_on_one_pair_is_the_mean_over_pairs_with_unit_weights() -> None:
    zero = torch.zeros(2, dtype=torch.float64)
    policy = torch.tensor([1.0, 0.5], dtype=torch.float64)
    batch = TokenBatch(
        policy, zero + 1, torch.tensor([1.0, -1.0], dtype=torch.float64), zero, zero, zero,
        sequence_index=torch.tensor([0, 1]), num_sequences=2,
    )  # fmt: skip
    sums = Dpo(Dpo.Options(beta=2.0))(batch)
    assert sums.total.item() / 2 == pytest.approx(math.log(1 + math.exp(-1.0)))
    metrics = {name: float(value) for name, value in sums.metrics.items()}
    assert metrics == {"preference_pairs": 1, "preference_correct": 1, "preference_margin": 1}


def test_dpo_without_a_pair_is_zero_and_without_reference_says_so() -> None:
    batch = make_batch()
    batch.advantages = batch.advantages.abs()
    total = loss_of({"name": "dpo"})(batch).total
    assert total.item() == 0 and total.requires_grad
    with pytest.raises(ValueError, match="reference_logprobs"):
        loss_of({"name": "dpo"})(replace(batch, reference_logprobs=None))


def test_an_extreme_ratio_stays_finite() -> None:
    batch = make_batch()
    with torch.no_grad():
        batch.policy_logprobs[:] = 0.0
        batch.behaviour_logprobs[:] = -1000.0
    total = PolicyGradient(PolicyGradient.Options())(batch).total
    assert abs(total.item()) <= math.exp(20) * float((batch.weights * batch.advantages).abs().sum()) * 1.0001


def test_clip_fraction_counts_active_clips_only() -> None:
    one = torch.ones(4, dtype=torch.float64)
    ratio = torch.tensor([1.5, 0.5, 1.5, 1.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0], dtype=torch.float64)
    batch = TokenBatch(ratio.log(), one, advantages, one * 0, one * 0)
    assert float(Ppo(Ppo.Options())(batch).metrics["clip_fraction"]) == 1


def test_bounds_that_cross_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"smallest ratio 2\.0 is above the largest, 1\.2"):
        loss_of({"name": "ppo", "ratio_low": 2.0})


@pytest.mark.parametrize("clip", [0.2, None])
def test_value_loss_is_as_written_out(clip: float | None) -> None:
    batch = make_batch(7)
    assert batch.values is not None and batch.returns is not None
    predicted = (batch.values + torch.linspace(-0.5, 0.5, len(batch.weights), dtype=torch.float64)).requires_grad_()
    total, count = 0.0, 0
    columns = (predicted, batch.values, batch.returns, batch.weights)
    for v, before, g, w in zip(*(item.tolist() for item in columns), strict=True):
        plain = (v - g) ** 2
        bounded = plain if clip is None else (before + min(max(v - before, -clip), clip) - g) ** 2
        total += w * max(plain, bounded) / 2
        count += w != 0 and bounded > plain
    sums = clipped_value_loss(*columns, clip)
    assert sums.total.item() == pytest.approx(total, rel=1e-12)
    assert float(sums.metrics["value_clip_fraction"]) == count and (clip is None or count > 0)
    rest = (batch.values, batch.returns, batch.weights, clip)
    assert torch.autograd.gradcheck(lambda p: clipped_value_loss(p, *rest).total, (predicted,))


def test_value_loss_ignores_masked_tokens() -> None:
    batch = make_batch(7)
    assert batch.values is not None and batch.returns is not None
    masked = batch.weights == 0
    predicted = batch.values.clone()
    predicted[masked] = math.nan
    predicted.requires_grad_()
    sums = clipped_value_loss(predicted, batch.values, batch.returns.masked_fill(masked, math.inf), batch.weights)
    sums.total.backward()
    assert sums.total.isfinite() and predicted.grad is not None
    assert predicted.grad.isfinite().all() and not predicted.grad[masked].any()
