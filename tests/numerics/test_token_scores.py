"""Log-probabilities, entropy and their gradients, chunk by chunk, against a softmax over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.trainer.model import logprobs
from services.trainer.model.logprobs import TokenScores, token_logprobs, token_scores, top_logprobs

COUNT, WIDTH, VOCABULARY, K = 11, 6, 13, 3


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four positions a visit, so that there are several and the last one is short."""
    monkeypatch.setitem(logprobs._CHUNK_ELEMENTS, "cpu", 4 * VOCABULARY)


def inputs(frozen: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(COUNT, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64, requires_grad=not frozen)
    targets = torch.randint(VOCABULARY, (COUNT,), generator=generator)
    factor = torch.rand(COUNT, generator=generator, dtype=torch.float64) + 0.5
    chosen = torch.stack([torch.randperm(VOCABULARY, generator=generator)[:K] for _ in range(COUNT)])
    return hidden, head, targets, factor, chosen


def whole(hidden: Tensor, head: Tensor, targets: Tensor, factor: Tensor, chosen: Tensor) -> TokenScores:
    logits = (hidden @ head.T * factor[:, None]).log_softmax(-1)
    entropy = -(logits.exp() * logits).sum(-1)
    return TokenScores(logits.gather(1, targets[:, None])[:, 0], entropy, logits.gather(1, chosen))


def mixed(scores: TokenScores, entropy: bool) -> Tensor:
    """A scalar in which every output has its own factor."""
    ramp = torch.linspace(-1, 1, COUNT, dtype=torch.float64)
    total = (scores.logprobs * ramp).sum() + (scores.chosen.sin() * ramp[:, None]).sum()
    return total + (scores.entropy * ramp.cos()).sum() if entropy else total


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("with_ids", [False, True])
def test_values_and_gradients_equal_those_over_all_logits(frozen: bool, entropy: bool, with_ids: bool) -> None:
    hidden, head, targets, factor, chosen = inputs(frozen)
    ids = chosen if with_ids else chosen[:, :0]
    found = token_scores(hidden, head, targets, factor, ids if with_ids else None, entropy)
    expected = whole(hidden, head, targets, factor, ids)
    for name in ("logprobs", "entropy", "chosen"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-10, atol=1e-12)
    assert found.entropy.requires_grad == entropy
    leaves = [hidden] if frozen else [hidden, head]
    ours = torch.autograd.grad(mixed(found, entropy), leaves)
    theirs = torch.autograd.grad(mixed(expected, entropy), leaves)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_gradcheck_of_everything_at_once() -> None:
    hidden, head, targets, factor, chosen = inputs()

    def function(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        scores = token_scores(hidden, head, targets, factor, chosen, entropy_gradient=True)
        return scores.logprobs, scores.entropy, scores.chosen

    assert torch.autograd.gradcheck(function, (hidden, head))


def test_an_id_may_be_the_target_and_may_repeat() -> None:
    hidden, head, targets, factor, _ = inputs()
    ids = torch.stack([targets, targets], 1)
    found = token_scores(hidden, head, targets, factor, ids)
    assert torch.equal(found.chosen[:, 0], found.logprobs)
    (ours,) = torch.autograd.grad(found.chosen.sum() + found.logprobs.sum(), hidden)
    (theirs,) = torch.autograd.grad(3 * token_logprobs(hidden, head, targets, factor)[0].sum(), hidden)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_the_factor_is_one_over_the_temperature() -> None:
    hidden, head, targets, _, _ = inputs()
    found, _ = token_logprobs(hidden, head, targets, torch.full((COUNT,), 1 / 0.7, dtype=torch.float64))
    expected = (hidden @ head.T / 0.7).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_the_likeliest_tokens_come_first() -> None:
    hidden, head, _, factor, _ = inputs()
    ids, found = top_logprobs(hidden, head, factor, K)
    expected = (hidden @ head.T * factor[:, None]).log_softmax(-1).topk(K)
    assert torch.equal(ids, expected.indices) and not found.requires_grad
    torch.testing.assert_close(found, expected.values, rtol=1e-10, atol=1e-12)
