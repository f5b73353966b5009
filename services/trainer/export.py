"""`python -m services.trainer.export CONFIG OUT [--step N]`: a model folder from a checkpoint, without a service."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from paceline.config import ConfigError, load_run_file
from paceline.config.trainer import TrainerConfig
from paceline.plugins import registry
from paceline.rpc.errors import NotFound, PacelineError
from services.trainer.checkpoint import Checkpoint, CheckpointStore, step_name
from services.trainer.exporting import export_run

_TRIES = 5
"""A checkpoint that is removed just when it is chosen gives way to a newer one."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.trainer.export", description=__doc__)
    parser.add_argument("config", type=Path, help="config.json of the run")
    parser.add_argument("out", type=Path, help="folder to write; an earlier one is replaced")
    parser.add_argument("--step", type=int, default=0, help="step of the checkpoint; default: the newest")
    arguments = parser.parse_args()
    try:
        checkpoint = export(arguments.config, arguments.out, arguments.step)
    except (ConfigError, PacelineError, OSError) as error:
        sys.exit(f"export: {error}")
    print(f"step {checkpoint.step}, weight version {checkpoint.weight_version}, is in {arguments.out}")


def export(config_path: Path, out: Path, step: int) -> Checkpoint:
    """Load a checkpoint and write it as a Hugging Face folder. ConfigError when the run has none."""
    config = load_run_file(config_path)
    store = CheckpointStore(config.directory / "checkpoints", config.trainer.keep_checkpoints)
    torch.set_num_threads(config.trainer.threads)
    # One process can hold what ranks wrote: a state is the same whatever the number of ranks. No reference, no teacher.
    keys = ("dtype", "lora", "threads", "optimizer")
    alone = TrainerConfig(**{key: getattr(config.trainer, key) for key in keys})
    backend = registry("train_backend").load("torch")(Path(config.model.path), alone, config.run.seed)
    with _held(store, step, out.with_name(f".held-{out.name}")) as checkpoint:
        if checkpoint is None:
            raise ConfigError(f"run {config.run.name!r} has no checkpoint in {store.root} yet")
        backend.load_state(checkpoint.directory, optimizer=False)
        export_run(backend, out, checkpoint.step, checkpoint.weight_version)
        return checkpoint


@contextmanager
def _held(store: CheckpointStore, step: int, place: Path) -> Iterator[Checkpoint | None]:
    """A checkpoint (step 0: the newest) under a second name, as a run that goes on removes its older ones."""
    try:
        tries = _TRIES if step == 0 else 1
        while True:
            tries -= 1
            try:
                held = _hold(store, step, place)
                break
            except (NotFound, FileNotFoundError, shutil.Error):
                if not tries:
                    raise
        yield held
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _hold(store: CheckpointStore, step: int, place: Path) -> Checkpoint | None:
    shutil.rmtree(place, ignore_errors=True)
    found = store.open(step_name(step)) if step else store.newest()
    if found is None:
        return None
    name = found.directory.name
    shutil.copytree(found.directory, place / name, copy_function=_link)
    return CheckpointStore(place, keep=1).open(name)


def _link(source: str, target: str) -> str:
    """A second name for the same bytes where the file system has that, else a copy."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
    return target


if __name__ == "__main__":
    main()
