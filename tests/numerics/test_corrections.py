"""Corrections in float64 against loops that are written out, and what they do to a loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from token_batches import LENGTHS, make_batch

from services.trainer.losses.base import TokenBatch
from services.trainer.objective import Objective

Weights = Callable[[list[float], int, list[float]], float]
"""From the log-ratios of a sequence, a token's place in it and the sequence's advantages, that token's weight."""


def within(value: float, low: float, high: float) -> float:
    return value if low <= value <= high else 0.0


def level(gaps: list[float], place: int, name: str) -> float:
    return math.exp({"token": gaps[place], "sequence": sum(gaps), "geometric": sum(gaps) / len(gaps)}[name])


def mis(name: str, mode: str, low: float, high: float) -> Weights:
    def weight(gaps: list[float], place: int, advantages: list[float]) -> float:
        ratio = level(gaps, place, name)
        bounded = {"truncate": min(ratio, high), "clip": min(max(ratio, low), high), "mask": within(ratio, low, high)}
        return bounded[mode]

    return weight


def rejection(name: str, high: float, veto: float | None) -> Weights:
    def weight(gaps: list[float], place: int, advantages: list[float]) -> float:
        if veto is not None and min(gaps) < math.log(veto):
            return 0.0
        return float(1 / high <= level(gaps, place, name) <= high)

    return weight


CASES: dict[str, tuple[dict[str, object], Weights]] = {
    "tis": ({"name": "tis"}, lambda gaps, i, a: min(math.exp(gaps[i]), 2.0)),
    "tis, clip": ({"name": "tis", "clip": 1.1}, lambda gaps, i, a: min(math.exp(gaps[i]), 1.1)),
    "icepop": ({"name": "icepop"}, lambda gaps, i, a: within(math.exp(gaps[i]), 0.5, 5.0)),
    "icepop, tight": ({"name": "icepop", "lower": 0.9, "upper": 1.3}, lambda g, i, a: within(math.exp(g[i]), 0.9, 1.3)),
    **{
        f"mis {name} {mode}": ({"name": "mis", "level": name, "mode": mode, "upper": 1.25}, mis(name, mode, 0.8, 1.25))
        for name in ("token", "sequence", "geometric")
        for mode in ("truncate", "clip", "mask")
    },
    "mis, own lower": ({"name": "mis", "mode": "clip", "lower": 0.3}, mis("token", "clip", 0.3, 2.0)),
    **{
        f"rejection {name}, veto {veto}": (
            {"name": "rejection", "level": name, "upper": 1.3, "veto": veto}, rejection(name, 1.3, veto)
        )
        for name in ("token", "sequence", "geometric")
        for veto in (None, 0.7)
    },
}  # fmt: skip


def weights_of(table: dict[str, object], batch: TokenBatch) -> torch.Tensor:
    (correction,) = Objective.from_spec({"loss": {"name": "ppo"}, "corrections": [table]}).corrections
    return correction(batch)


@pytest.mark.parametrize("case", CASES)
def test_weights_are_as_written_out(case: str) -> None:
    table, reference = CASES[case]
    seen = set()
    for seed in range(6):
        batch = make_batch(seed)
        gap = (batch.behaviour_logprobs - batch.sampler_logprobs).tolist()
        found = weights_of(table, batch)
        assert not found.requires_grad
        for sequence in range(len(LENGTHS)):
            places = ((batch.sequences == sequence) & batch.mask).nonzero().flatten().tolist()
            gaps = [gap[place] for place in places]
            for order, place in enumerate(places):
                expected = reference(gaps, order, batch.advantages[torch.tensor(places)].tolist())
                assert found[place].item() == pytest.approx(expected, rel=1e-12)
                seen.add(expected == 0)
    if "mask" in case or "rejection" in case or "tight" in case:
        assert seen == {True, False}, "the case shows neither what is kept nor what is rejected"


@pytest.mark.parametrize("delta", [1e-4, 0.1])
def test_opsm_drops_failed_sequences_that_the_policy_left(delta: float) -> None:
    seen = set()
    for seed in range(6):
        batch = make_batch(seed)
        found = weights_of({"name": "opsm", "delta": delta}, batch)
        for sequence in range(len(LENGTHS)):
            own = (batch.sequences == sequence) & batch.mask
            moved = (batch.sampler_logprobs - batch.policy_logprobs)[own].mean().item()
            rejected = moved > delta and batch.advantages[own][0].item() < 0
            assert (found[own] == (0.0 if rejected else 1.0)).all()
            seen.add(rejected)
    assert seen == {True, False}


def test_corrections_multiply_and_leave_the_penalties_and_the_denominator_alone() -> None:
    batch = make_batch(8)
    tables = [{"name": "tis", "clip": 1.2}, {"name": "rejection", "level": "sequence", "upper": 1.5}]
    spec = {"loss": {"name": "importance_sampling"}, "kl_coefficient": 0.5}
    plain, corrected = Objective.from_spec(spec), Objective.from_spec({**spec, "corrections": tables})
    factor = torch.stack([weights_of(table, batch) for table in tables]).prod(0)
    reference = plain(replace(batch, weights=batch.weights * factor))
    kl = plain(batch)
    sums = corrected(batch)
    assert sums.metrics["policy_loss"].item() == pytest.approx(reference.metrics["policy_loss"].item(), rel=1e-12)
    rest = kl.total - kl.metrics["policy_loss"]
    assert (sums.total - sums.metrics["policy_loss"]).item() == pytest.approx(rest.item(), rel=1e-12)
    assert sums.metrics["kl_reference"] == kl.metrics["kl_reference"], "over all tokens, rejected ones included"


def test_metrics_of_corrections_are_over_the_tokens_before_rejection() -> None:
    batch = make_batch(8)
    table = {"name": "icepop", "lower": 0.9, "upper": 1.3}
    metrics = Objective.from_spec({"loss": {"name": "ppo"}, "corrections": [table]})(batch).metrics
    weights = weights_of(table, batch)[batch.mask]
    assert 0 < float(metrics["correction_rejected_fraction"]) == int((weights == 0).sum())
    assert float(metrics["correction_weight_mean"]) == pytest.approx(weights.sum().item())
    assert float(metrics["correction_weight_max"]) == pytest.approx(weights.max().item())
    assert float(metrics["correction_weight_square"]) == pytest.approx(weights.square().sum().item())


def test_the_whole_batch_may_be_rejected() -> None:
    batch = make_batch()
    batch.sampler_logprobs = batch.behaviour_logprobs - 10.0
    sums = Objective.from_spec({"loss": {"name": "ppo"}, "corrections": [{"name": "icepop"}]})(batch)
    sums.total.backward()
    assert sums.total.item() == 0 and not batch.policy_logprobs.grad.any()  # type: ignore[union-attr]
    assert float(sums.metrics["correction_rejected_fraction"]) == int(batch.mask.sum())
