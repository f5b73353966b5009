"""On-policy distillation: how far the policy is from a teacher, on the sampled tokens or on the teacher's likeliest.

A penalty on the sampled token's advantage has the gradient of KL(policy || teacher) in expectation, as it depends on
the token that was drawn. A divergence over several tokens does not; detached it would have no expected gradient at
all, so it is a term of the loss and carries its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config.trainer import Direction

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST_TAIL = 1e-6
"""Probability that the other tokens have at least; float32 sums of probabilities are not exact to more."""


def distilled_advantages(
    advantages: Tensor, policy_logprobs: Tensor, teacher_logprobs: Tensor, coefficient: float
) -> Tensor:
    """A - coefficient (policy - teacher) on the sampled token, detached. All [num_tokens]; ValueError otherwise.

    Source: on-policy distillation, Agarwal et al., arXiv:2306.13649, with the reverse KL, estimated on the sampled
    tokens as by K. Lu et al., "On-Policy Distillation", Thinking Machines Lab, 2025.
    """
    if not advantages.shape == policy_logprobs.shape == teacher_logprobs.shape:
        shapes = [list(item.shape) for item in (advantages, policy_logprobs, teacher_logprobs)]
        raise ValueError(f"advantages, policy and teacher log-probabilities have the shapes {shapes}; they must agree")
    return advantages - coefficient * (policy_logprobs - teacher_logprobs).detach()


def topk_divergence(
    policy_logprobs: Tensor, teacher_logprobs: Tensor, direction: Direction = "reverse", tail: bool = True
) -> Tensor:
    """KL over k tokens of each position, [num_tokens] from two [num_tokens, k], with the gradient of the policy's.

    "reverse" is KL(policy || teacher), "forward" KL(teacher || policy). With `tail` all other tokens are one more, so
    that both sum to 1 and the result is at most the KL over the whole vocabulary (data processing inequality); without,
    both are renormalized over the k tokens. Source: arXiv:2306.13649, eq. 2 and 3, on a coarser alphabet.
    """
    if tail:
        policy_logprobs, teacher_logprobs = _with_tail(policy_logprobs), _with_tail(teacher_logprobs)
    else:
        policy_logprobs = policy_logprobs - policy_logprobs.logsumexp(-1, keepdim=True)
        teacher_logprobs = teacher_logprobs - teacher_logprobs.logsumexp(-1, keepdim=True)
    difference = policy_logprobs - teacher_logprobs
    if direction == "reverse":
        return (policy_logprobs.exp() * difference).sum(-1)
    return -(teacher_logprobs.exp() * difference).sum(-1)


def _with_tail(logprobs: Tensor) -> Tensor:
    """[num_tokens, k + 1]: the last is the logarithm of what is missing to 1."""
    tail = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=_SMALLEST_TAIL).log()
    joined = logprobs.new_empty(*logprobs.shape[:-1], logprobs.shape[-1] + 1)
    joined[..., :-1], joined[..., -1:] = logprobs, tail
    return joined
