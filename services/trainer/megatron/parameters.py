"""The parameters of this rank by the rules of the model's family: whole Hugging Face tensors in, and out again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.config import ConfigError
from paceline.rpc import errors
from services.trainer.megatron.compat import mark_shared
from services.trainer.megatron.layout import Axis, Layout
from services.trainer.megatron.mapping import Padded, Rule
from services.trainer.megatron.model import Stage
from services.trainer.megatron.tensors import read_row
from services.trainer.model.shards import Piece, PieceReader
from services.trainer.models.base import ModelFamily

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class Entry:
    """A parameter, its rule, the ranks that share it and those that have the same of it."""

    parameter: nn.Parameter
    rule: Rule
    sharers: Axis
    replicas: Axis


@dataclass(frozen=True)
class Found:
    """A Hugging Face tensor on the host, or rows of one."""

    name: str
    tensor: Tensor
    piece: Piece | None = None


def entries_of(stage: Stage) -> list[Entry]:
    """The parameters of this rank in an order that the ranks which share or replicate them have too."""
    layout = stage.layout
    parameters = dict(stage.model.named_parameters())
    found = []
    for rule in stage_rules(stage):
        parameter = parameters.pop(rule.parameter, None)
        if parameter is None:
            raise ConfigError(f"the rules of {stage.source.model_type} have {rule.parameter}, its model has not")
        mark_shared(parameter, rule.cut)
        own = rule.expert is not None
        sharers = layout.expert_tensor if own else layout.tensor
        found.append(Entry(parameter, rule, sharers, layout.expert_replicas if own else layout.replicas))
    if parameters:
        raise ConfigError(f"the rules of {stage.source.model_type} leave {sorted(parameters)} out")
    return found


def stage_rules(stage: Stage) -> list[Rule]:
    """The rules of the parameters that this rank has, with their names in its model."""
    layout = stage.layout
    rows = Padded(stage.vocabulary, stage.rows * layout.tensor.size)
    found = []
    if layout.first_stage:
        found.append(Rule("embedding.word_embeddings.weight", (EMBEDDING,), rows, cut=0))
    for place, number in enumerate(stage.layers):
        for rule in stage.family.layer(number):
            own = _own(rule, layout, stage.config.num_moe_experts or 0)
            if own is not None:
                found.append(replace(own, parameter=f"decoder.layers.{place}.{own.parameter}"))
    if layout.last_stage:
        found.append(Rule("decoder.final_layernorm.weight", (NORM,)))
        if not stage.tied:
            found.append(Rule("output_layer.weight", (HEAD,), rows, cut=0))
        elif not layout.first_stage:
            found.append(Rule("output_layer.weight", (EMBEDDING,), rows, cut=0, copy=True))
    return found


def tensor_names(family: ModelFamily, num_layers: int, tied: bool) -> set[str]:
    """Every tensor of the Hugging Face model."""
    names = {EMBEDDING, NORM} | (set() if tied else {HEAD})
    return names.union(*(rule.tensors for number in range(num_layers) for rule in family.layer(number)))


class TensorSource:
    """Reads the tensors of a model folder or of a checkpoint, also where a folder has experts one by one."""

    def __init__(self, reader: PieceReader, family: ModelFamily) -> None:
        self._reader = reader
        self._family = family

    def read(self, entry: Entry, prefix: str = "") -> Tensor:
        """This rank's part of an entry, float32. FailedPrecondition when a tensor is missing or has another shape."""
        rule = entry.rule
        tensors = [read_row(self._reader, self._family, name, rule.expert, prefix).float() for name in rule.tensors]
        shape = tuple(entry.parameter.shape)
        try:
            part = rule.part(tensors, entry.sharers.rank, entry.sharers.size)
        except RuntimeError as error:
            raise self._mismatch(rule, [tuple(item.shape) for item in tensors], str(error)) from error
        if tuple(part.shape) != shape:
            raise self._mismatch(rule, [tuple(item.shape) for item in tensors], f"{list(shape)} is needed here")
        return part

    def _mismatch(self, rule: Rule, shapes: list[tuple[int, ...]], reason: str) -> Exception:
        return errors.FailedPrecondition(
            f"{self._reader.folder}: {', '.join(rule.tensors)} of shapes {shapes} are not this policy's: {reason}"
        )


def whole_tensors(
    entries: list[Entry], values: Callable[[Entry], Tensor], writer: Callable[[int, Entry], bool], num_experts: int
) -> Iterator[Found]:
    """Whole tensors (experts: this rank's rows), on the rank that `writer(index, entry)` says, else nothing.

    `values` gives this rank's part of an entry. Collective over the ranks that share entries, which must all go through
    it in step.
    """
    rows: dict[str, list[tuple[int, Tensor]]] = {}
    for index, entry in enumerate(entries):
        if entry.rule.copy:
            continue
        parts = _gathered(values(entry), entry)
        if not writer(index, entry):
            continue
        for name, tensor in zip(entry.rule.tensors, entry.rule.whole(parts), strict=True):
            tensor = tensor.detach().to("cpu", copy=True)
            if entry.rule.expert is None:
                yield Found(name, tensor)
            else:
                rows.setdefault(name, []).append((entry.rule.expert, tensor))
    for name, items in rows.items():
        tensor = torch.stack([item for _, item in sorted(items, key=lambda item: item[0])])
        yield Found(name, tensor, Piece(min(number for number, _ in items), (num_experts, *tensor.shape[1:])))


def _own(rule: Rule, layout: Layout, num_experts: int) -> Rule | None:
    """The rule as this rank's model has it; None where another rank has the expert."""
    if rule.expert is None:
        return rule
    count = num_experts // layout.expert.size
    if rule.expert // count != layout.expert.rank:
        return None
    here = rule.parameter.replace(f"local_experts.{rule.expert}.", f"local_experts.{rule.expert % count}.")
    return replace(rule, parameter=here)


def _gathered(local: Tensor, entry: Entry) -> list[Tensor]:
    if entry.rule.cut is None or entry.sharers.size == 1:
        return [local]
    parts = [torch.empty_like(local) for _ in range(entry.sharers.size)]
    dist.all_gather(parts, local.contiguous(), group=entry.sharers.group)
    return parts
