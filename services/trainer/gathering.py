"""From datums and index arrays to a TokenBatch: one way for all backends, which differ only in how logits are made."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.trainer.datum import Datum, Group, InvalidDatum
from services.trainer.token_batch import TokenBatch

_OPTIONAL = ("values", "returns", "reference_logprobs", "teacher_logprobs", "teacher_topk_logprobs")


def groups_of(groups: Sequence[Group]) -> np.ndarray:
    """int64 [number of datums]: which group each datum belongs to, for datums numbered through all groups."""
    return np.repeat(np.arange(len(groups)), [len(group) for group in groups])


def token_zeros(groups: Sequence[Group]) -> list[list[np.ndarray]]:
    """float32 [num_tokens] for each datum of each group, all 0."""
    return [[np.zeros(len(datum.token_ids), np.float32) for datum in group] for group in groups]


def scatter_tokens(values: Tensor, datum_index: np.ndarray, token_index: np.ndarray, out: Sequence[np.ndarray]) -> None:
    """Write `values` [N] to the tokens `token_index` of the arrays `datum_index` of `out`."""
    numbers = values.float().cpu().numpy()
    for datum in np.unique(datum_index):
        chosen = datum_index == datum
        out[datum][token_index[chosen]] = numbers[chosen]


def gather_tokens(
    data: Sequence[Datum], datum_index: np.ndarray, token_index: np.ndarray, group_of_datum: np.ndarray,
    policy_logprobs: Tensor, *, reference_logprobs: Tensor | None = None, entropy: Tensor | None = None,
    policy_topk_logprobs: Tensor | None = None, teacher_logprobs: Tensor | None = None,
    teacher_topk_logprobs: Tensor | None = None,
) -> TokenBatch:  # fmt: skip
    """The batch of the tokens `token_index` [N] of the datums `datum_index` [N], on the device of policy_logprobs [N].

    Tokens of a datum that has no behaviour_logprobs take the policy's own, detached. What is not given is taken from
    the datums where they have it; InvalidDatum when some of them have an optional field and others not.
    """
    chosen, members, sequence, places = _members(data, datum_index, token_index)

    def gather(name: str) -> Tensor:
        return _field(members, places, name, policy_logprobs)

    given = {
        "reference_logprobs": reference_logprobs, "teacher_logprobs": teacher_logprobs,
        "teacher_topk_logprobs": teacher_topk_logprobs,
    }  # fmt: skip
    optional = {name: value for name, value in given.items() if value is not None}
    optional.update({name: gather(name) for name in _OPTIONAL if name not in optional and has_field(members, name)})
    return TokenBatch(
        policy_logprobs=policy_logprobs, weights=gather("weights"), advantages=gather("advantages"),
        sampler_logprobs=gather("sampler_logprobs"), behaviour_logprobs=_behaviour(members, places, policy_logprobs),
        entropy=entropy, policy_topk_logprobs=policy_topk_logprobs,
        sequence_index=_index(sequence, policy_logprobs), num_sequences=max(1, len(chosen)),
        group_of_sequence=_index(group_of_datum[chosen] if len(chosen) else np.zeros(1), policy_logprobs), **optional,
    )  # fmt: skip


def gather_field(
    data: Sequence[Datum], datum_index: np.ndarray, token_index: np.ndarray, name: str, like: Tensor
) -> Tensor:
    """[N]: a field of the given tokens, in the type and on the device of `like`."""
    _, members, _, places = _members(data, datum_index, token_index)
    return _field(members, places, name, like)


def gather_topk_ids(data: Sequence[Datum], datum_index: np.ndarray, token_index: np.ndarray, device: object) -> Tensor:
    """int64 [N, k]: ids of the teacher's likeliest tokens at the given tokens. InvalidDatum when a datum has none."""
    _, members, _, places = _members(data, datum_index, token_index)
    if not has_field(members, "teacher_topk_ids"):
        raise InvalidDatum("the objective needs teacher_topk_ids, which the datums have not")
    flat = np.concatenate([item.teacher_topk_ids for item in members if item.teacher_topk_ids is not None])
    return torch.from_numpy(flat[places].astype(np.int64)).to(device)  # type: ignore[arg-type]


def _members(
    data: Sequence[Datum], datum_index: np.ndarray, token_index: np.ndarray
) -> tuple[np.ndarray, list[Datum], np.ndarray, np.ndarray]:
    """Indices of the datums that have a token [S], these datums, and of each token its datum among them and its place
    in their tokens one after another, [N] each."""
    chosen, sequence = np.unique(datum_index, return_inverse=True)
    members = [data[index] for index in chosen]
    starts = np.cumsum([0] + [len(item.token_ids) for item in members])
    return chosen, members, sequence, starts[sequence] + token_index


def has_field(data: Sequence[Datum], name: str) -> bool:
    """Whether the datums have the optional field. InvalidDatum when some have it and others not."""
    without = [item for item in data if getattr(item, name) is None]
    if not without:
        return bool(data)
    if len(without) < len(data):
        raise InvalidDatum(f"{without[0].name or 'a datum'} has no {name}, but others of its micro-batch have")
    return False


def _behaviour(members: Sequence[Datum], places: np.ndarray, policy_logprobs: Tensor) -> Tensor:
    own = policy_logprobs.detach()
    known = [item.behaviour_logprobs for item in members]
    if all(item is None for item in known):
        return own
    flat = np.concatenate([
        np.full(len(member.token_ids), np.nan, np.float32) if item is None else item
        for member, item in zip(members, known, strict=True)
    ])  # fmt: skip
    missing = np.concatenate(
        [np.full(len(member.token_ids), item is None) for member, item in zip(members, known, strict=True)]
    )
    return torch.where(torch.from_numpy(missing[places]).to(own.device), own, _on(flat[places], own))


def _field(members: Sequence[Datum], places: np.ndarray, name: str, like: Tensor) -> Tensor:
    return _on(np.concatenate([getattr(item, name) for item in members])[places], like)


def _on(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device, like.dtype)


def _index(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device)
