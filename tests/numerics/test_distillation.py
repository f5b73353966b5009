"""Divergences over a teacher's likeliest tokens, in float64 against sums that are written out."""

from __future__ import annotations

import math

import pytest
import torch
from token_batches import TOPK, make_batch
from torch import Tensor

from services.trainer.objective import Objective
from services.trainer.penalties.distillation import distilled_advantages, topk_divergence

COUNT, VOCABULARY, K = 6, 9, 4


def distributions() -> tuple[Tensor, Tensor, Tensor]:
    """Whole log-probabilities of policy and teacher, and ids of the teacher's K likeliest tokens."""
    generator = torch.Generator().manual_seed(0)
    policy, teacher = torch.randn(2, COUNT, VOCABULARY, generator=generator, dtype=torch.float64).log_softmax(-1)
    return policy, teacher, teacher.topk(K, dim=-1).indices


def written_out(policy: Tensor, teacher: Tensor, ids: Tensor, direction: str, tail: bool) -> list[float]:
    result = []
    for p_row, t_row, chosen in zip(policy.exp().tolist(), teacher.exp().tolist(), ids.tolist(), strict=True):
        p, t = [p_row[i] for i in chosen], [t_row[i] for i in chosen]
        if tail:
            p, t = [*p, 1 - sum(p)], [*t, 1 - sum(t)]
        else:
            p, t = [x / sum(p) for x in p], [x / sum(t) for x in t]
        a, b = (p, t) if direction == "reverse" else (t, p)
        result.append(sum(x * math.log(x / y) for x, y in zip(a, b, strict=True)))
    return result


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("tail", [True, False])
def test_divergence_is_as_written_out(direction: str, tail: bool) -> None:
    policy, teacher, ids = distributions()
    student = policy.gather(1, ids).requires_grad_()
    target = teacher.gather(1, ids)
    found = topk_divergence(student, target, direction, tail)  # type: ignore[arg-type]
    assert found.tolist() == pytest.approx(written_out(policy, teacher, ids, direction, tail), rel=1e-10)
    assert torch.autograd.gradcheck(
        lambda item: topk_divergence(item, target, direction, tail),  # type: ignore[arg-type]
        (student,),
    )


def test_with_a_tail_it_is_a_lower_bound_that_grows_with_k() -> None:
    policy, teacher, _ = distributions()
    whole = (policy.exp() * (policy - teacher)).sum(-1)
    before = torch.zeros(COUNT, dtype=torch.float64)
    for k in range(1, VOCABULARY):
        ids = teacher.topk(k, dim=-1).indices
        found = topk_divergence(policy.gather(1, ids), teacher.gather(1, ids))
        assert (found >= before - 1e-12).all() and (found <= whole + 1e-12).all()
        before = found
    torch.testing.assert_close(before, whole, rtol=1e-9, atol=1e-12)


def test_a_certain_teacher_gives_no_nan() -> None:
    certain = torch.tensor([[0.0, -80.0]], requires_grad=True)
    found = topk_divergence(certain, torch.tensor([[0.0, -90.0]]))
    found.sum().backward()
    assert found.isfinite().all() and certain.grad is not None and certain.grad.isfinite().all()


def test_shapes_that_would_broadcast_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shapes \[\[3\], \[3\], \[1\]\]"):
        distilled_advantages(torch.zeros(3), torch.zeros(3), torch.zeros(1), 1.0)


def test_sampled_mode_moves_advantages_and_reports_the_kl() -> None:
    batch = make_batch(3)
    assert batch.teacher_logprobs is not None
    spec = {"loss": {"name": "importance_sampling"}, "distillation": {"coefficient": 0.5}}
    sums = Objective.from_spec(spec)(batch)
    mask = batch.mask
    gap = (batch.policy_logprobs.detach() - batch.teacher_logprobs)[mask]
    ratio = (batch.policy_logprobs - batch.behaviour_logprobs).exp()[mask]
    expected = -(ratio * (batch.advantages[mask] - 0.5 * gap) * batch.weights[mask]).sum()
    assert sums.total.item() == pytest.approx(expected.item(), rel=1e-12)
    assert float(sums.metrics["distillation_kl"]) == pytest.approx(gap.sum().item(), rel=1e-12)


def test_topk_mode_adds_the_divergence_to_the_loss() -> None:
    batch = make_batch(3)
    assert batch.policy_topk_logprobs is not None and batch.teacher_topk_logprobs is not None
    spec = {"loss": {"name": "ppo"}, "distillation": {"mode": "topk", "k": TOPK, "coefficient": 0.7}}
    divergence = topk_divergence(batch.policy_topk_logprobs, batch.teacher_topk_logprobs)
    plain = Objective.from_spec({"loss": {"name": "ppo"}})(batch).total
    expected = plain + 0.7 * (divergence * batch.weights).sum()
    assert Objective.from_spec(spec)(batch).total.item() == pytest.approx(expected.item(), rel=1e-12)


def test_what_is_missing_is_named() -> None:
    batch = make_batch()
    batch.teacher_logprobs, batch.entropy = None, batch.entropy.detach()  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="needs teacher_logprobs"):
        Objective.from_spec({"loss": {"name": "ppo"}, "distillation": {}})(batch)
    with pytest.raises(ValueError, match="gradient of entropy"):
        Objective.from_spec({"loss": {"name": "ppo"}, "entropy_coefficient": 0.1})(batch)
