"""The state of a policy as whole Hugging Face tensors, masters and moments alike: any layout and backend can read it.

megatron-core's own distributed checkpoints hold pickles and spawn writers, and lose the optimizer when experts move.
"""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.rpc import errors
from services.trainer.megatron.model import Stage
from services.trainer.megatron.parameters import Entry, TensorSource, tensor_names, whole_tensors
from services.trainer.megatron.updates import MOMENTS, Updates
from services.trainer.model.shards import PieceReader
from services.trainer.model.state import PARAMETERS, StateCopy, open_optimizer, read_progress, rng_state
from services.trainer.ranks.world import World


def state_copy(stage: Stage, entries: list[Entry], updates: Updates, world: World) -> StateCopy:
    """This rank's part: tensors that it writes, spread over the ranks that share them. Collective."""
    copy = StateCopy(
        {}, {}, {}, {"updates": updates.updates, "algorithm": "adamw"}, rng_state(world.device), world.rank
    )
    experts = stage.config.num_moe_experts or 0

    def writes(index: int, entry: Entry) -> bool:
        # All experts of a layer must come to one rank, which the first rank of the sharers is for all.
        turn = 0 if entry.rule.expert is not None else index % entry.sharers.size
        return entry.replicas.rank == 0 and entry.sharers.rank == turn

    for key in ("", *MOMENTS) if updates.moment_updates else ("",):
        for item in whole_tensors(entries, lambda entry: updates.read(entry, key), writes, experts):  # noqa: B023
            name = f"{key}.{item.name}" if key else item.name
            (copy.moments if key else copy.parameters)[name] = item.tensor
            if item.piece is not None:
                copy.pieces[name] = item.piece
            if key:
                copy.moments.setdefault(f"step.{item.name}", torch.tensor(float(updates.moment_updates)))
    return copy


def load(directory: Path, optimizer: bool, stage: Stage, entries: list[Entry], updates: Updates) -> None:
    """Take over a state. FailedPrecondition when its tensors are not those of this policy."""
    parameters = PieceReader(directory / PARAMETERS)
    moments = open_optimizer(directory, optimizer)
    progress = read_progress(directory)
    differing = sorted(tensor_names(stage.family, stage.config.num_layers, stage.tied) ^ set(parameters.shapes))
    if differing:
        raise errors.FailedPrecondition(
            f"{parameters.folder} does not hold this policy: {len(differing)} tensors differ, the first is "
            f"{differing[0]!r}; was model.path changed since it was written?"
        )
    updates.updates = int(progress["updates"])
    updates.moment_updates = _moment_updates(moments)
    masters = TensorSource(parameters, stage.family)
    averages = TensorSource(moments, stage.family) if moments is not None and updates.moment_updates else None
    for entry in entries:
        known = None if averages is None else {key: averages.read(entry, f"{key}.") for key in MOMENTS}
        updates.write(entry, masters.read(entry), known)
    updates.clear()


def _moment_updates(moments: PieceReader | None) -> int:
    """Updates that are in the moments. FailedPrecondition when tensors differ in it, as one optimizer has one."""
    if moments is None:
        return 0
    counts = {int(moments.read(name, None, 0)) for name in moments.shapes if name.startswith("step.")}
    if len(counts) > 1:
        raise errors.FailedPrecondition(f"{moments.folder}: moments of {sorted(counts)} updates cannot be put together")
    return counts.pop() if counts else 0
