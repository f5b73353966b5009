"""What every registered loss must do, and every objective made of one. A new loss is covered by being there."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from token_batches import LENGTHS, finite_differences, make_batch, part_of, poisoned
from torch import Tensor

from paceline.plugins import registry
from services.trainer.loss_metrics import LARGEST
from services.trainer.losses.base import LossSums, TokenBatch
from services.trainer.objective import Objective

NAMES = registry("loss").available()
VARIANTS = {
    "ppo, dual clip": {"loss": {"name": "ppo", "dual_clip": 1.2}},
    "ppo, absolute bounds": {"loss": {"name": "ppo", "ratio_low": 0.9, "ratio_high": 1.5}},
    "gspo, token form": {"loss": {"name": "gspo", "form": "token", "clip_low": 0.1, "clip_high": 0.1}},
    "policy gradient without ratio": {"loss": {"name": "policy_gradient", "importance_ratio": False}},
    "dpo, smoothed": {"loss": {"name": "dpo", "label_smoothing": 0.1, "beta": 0.7}},
    **{f"kl {kind}": {"loss": {"name": "ppo"}, "kl_coefficient": 0.3, "kl_kind": kind}
       for kind in ("k1", "k2", "k3", "low_variance", "unbiased")},
    "entropy": {"loss": {"name": "ppo"}, "entropy_coefficient": 0.2},
    "distillation, sampled": {"loss": {"name": "ppo"}, "distillation": {"mode": "sampled", "coefficient": 0.5}},
    "distillation, top-k": {"loss": {"name": "ppo"}, "distillation": {"mode": "topk", "k": 3}},
    "distillation, forward": {
        "loss": {"name": "ppo"}, "distillation": {"mode": "topk", "k": 3, "direction": "forward", "tail": False},
    },
    **{f"correction {name}": {"loss": {"name": "ppo"}, "corrections": [{"name": name}]}
       for name in registry("correction").available()},
    "two corrections": {
        "loss": {"name": "cispo"},
        "corrections": [{"name": "mis", "level": "sequence"}, {"name": "rejection", "upper": 1.2}],
    },
}  # fmt: skip
CASES: dict[str, Callable[[TokenBatch], LossSums]] = {
    **{name: Objective.from_spec({"loss": {"name": name}}) for name in NAMES},
    **{name: Objective.from_spec(spec) for name, spec in VARIANTS.items()},
}
DIFFERENTIATED = ("policy_logprobs", "entropy", "policy_topk_logprobs")


def gradients(case: str, batch: TokenBatch) -> dict[str, Tensor]:
    leaves = [getattr(batch, name) for name in DIFFERENTIATED]
    found = torch.autograd.grad(CASES[case](batch).total, leaves, allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if item is None else item
        for name, leaf, item in zip(DIFFERENTIATED, leaves, found, strict=True)
    }


@pytest.mark.parametrize("case", CASES)
def test_total_is_a_scalar_and_metrics_carry_no_gradient(case: str) -> None:
    sums = CASES[case](make_batch())
    assert sums.total.shape == () and sums.total.requires_grad
    for name, value in sums.metrics.items():
        assert value.shape == () and not value.requires_grad and math.isfinite(float(value)), name


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("token_advantages", [False, True])
def test_gradient_is_that_of_the_value(case: str, token_advantages: bool) -> None:
    batch = make_batch(1, token_advantages)
    for name, gradient in gradients(case, batch).items():
        point = getattr(batch, name).detach()

        def value(changed: Tensor, name: str = name) -> Tensor:
            return CASES[case](replace(batch, **{name: changed.requires_grad_()})).total

        torch.testing.assert_close(gradient, finite_differences(value, point), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("case", CASES)
def test_masked_tokens_give_neither_value_nor_gradient(case: str) -> None:
    clean = make_batch(2)
    dirty = poisoned(clean)
    assert CASES[case](clean).total.item() == CASES[case](dirty).total.item()
    one, other = gradients(case, clean), gradients(case, dirty)
    for name in DIFFERENTIATED:
        assert torch.equal(one[name], other[name]), name
        assert not other[name][clean.weights == 0].any(), name
    for name, value in CASES[case](dirty).metrics.items():
        assert math.isfinite(float(value)), name


@pytest.mark.parametrize("case", CASES)
def test_micro_batches_add_up(case: str) -> None:
    """Cut between groups, and where the loss is not one of pairs also between sequences."""
    batch = make_batch(3)
    whole = CASES[case](batch)
    cuts = [[[0, 1, 2, 3], [4, 5]]]
    if "dpo" not in case:
        cuts += [[[0, 4], [1, 2], [3, 5]], [[item] for item in range(len(LENGTHS))]]
    for cut in cuts:
        parts = [CASES[case](part_of(batch, sequences)) for sequences in cut]
        assert sum(item.total.item() for item in parts) == pytest.approx(whole.total.item(), rel=1e-12)
        for name, value in whole.metrics.items():
            combine = max if name.endswith(LARGEST) else sum
            assert combine(float(item.metrics[name]) for item in parts) == pytest.approx(float(value), rel=1e-12), name


@pytest.mark.parametrize("case", CASES)
def test_an_all_masked_batch_has_a_zero_that_can_be_differentiated(case: str) -> None:
    batch = make_batch()
    batch.weights = torch.zeros_like(batch.weights)
    batch = poisoned(batch)
    sums = CASES[case](batch)
    assert sums.total.item() == 0
    assert all(not item.any() for item in gradients(case, batch).values())
    assert all(float(value) == 0 for value in sums.metrics.values())


@pytest.mark.parametrize("case", CASES)
def test_an_empty_batch_is_zero(case: str) -> None:
    empty = part_of(make_batch(), [0])
    keep = torch.zeros(len(empty.weights), dtype=torch.bool)
    changes = {
        name: getattr(empty, name)[keep]
        for name in vars(empty)
        if name not in ("num_sequences", "group_of_sequence") and getattr(empty, name) is not None
    }
    assert CASES[case](replace(empty, **changes)).total.item() == 0


@pytest.mark.parametrize("case", CASES)
def test_extreme_log_ratios_stay_finite(case: str) -> None:
    batch = make_batch(4)
    with torch.no_grad():
        batch.policy_logprobs[::2] = -1000.0
        batch.behaviour_logprobs[1::3] = -1000.0
    assert CASES[case](batch).total.isfinite()
    assert all(item.isfinite().all() for item in gradients(case, batch).values())


@pytest.mark.parametrize("case", CASES)
def test_the_same_objective_comes_back_from_its_spec(case: str) -> None:
    objective = CASES[case]
    assert isinstance(objective, Objective)
    again = Objective.from_spec(objective.spec())
    assert again.spec() == objective.spec()
    assert again(make_batch()).total.item() == objective(make_batch()).total.item()
