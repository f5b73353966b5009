"""`python -m services.trainer.export CONFIG OUT [--step N]`: a model folder from a checkpoint, without a service."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from paceline.config import ConfigError, load_run_file
from paceline.config.trainer import ParallelConfig
from paceline.plugins import registry
from paceline.rpc.errors import PacelineError
from services.trainer.checkpoint import Checkpoint, CheckpointStore, step_name
from services.trainer.exporting import export_run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.export", description=__doc__)
    parser.add_argument("config", type=Path, help="config.json of the run")
    parser.add_argument("out", type=Path, help="folder to write; an earlier one is replaced")
    parser.add_argument("--step", type=int, default=0, help="step of the checkpoint; default: the newest")
    arguments = parser.parse_args()
    try:
        checkpoint = export(arguments.config, arguments.out, arguments.step)
    except (ConfigError, PacelineError) as error:
        sys.exit(f"export: {error}")
    print(f"step {checkpoint.step}, weight version {checkpoint.weight_version}, is in {arguments.out}")


def export(config_path: Path, out: Path, step: int) -> Checkpoint:
    """Load a checkpoint and write it as a Hugging Face folder. ConfigError when the run has none."""
    config = load_run_file(config_path)
    store = CheckpointStore(config.directory / "checkpoints", config.trainer.keep_checkpoints)
    checkpoint = store.open(step_name(step)) if step else store.newest()
    if checkpoint is None:
        raise ConfigError(f"run {config.run.name!r} has no checkpoint in {config.directory / 'checkpoints'} yet")
    torch.set_num_threads(config.trainer.threads)
    # One process can hold what ranks wrote: a state is the same whatever the number of ranks.
    alone = config.trainer.model_copy(update={"backend": "torch", "parallel": ParallelConfig(), "device": "cpu"})
    backend = registry("train_backend").load("torch")(Path(config.model.path), alone, config.run.seed)
    backend.load_state(checkpoint.directory, optimizer=False)
    export_run(backend, out, checkpoint.step, checkpoint.weight_version)
    return checkpoint


if __name__ == "__main__":
    main()
