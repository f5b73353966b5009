"""Evaluation of a checkpoint: engines, router, reward and rollout of its own, which serve what the checkpoint holds.

It has a folder, a Redis and a coordinator of its own, so that it changes nothing of the run, which may train meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from paceline.api.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from paceline.api.weights.v1 import weights_pb2
from paceline.config import ConfigError, RunFile, make_plugin, parse
from paceline.config.kinds import EVALUATING
from paceline.files import EXPORT_MARKER
from paceline.ids import new_id
from paceline.launcher.launcher import Launcher, Notify
from paceline.rpc.client import open_channel
from paceline.weights.manifest import Manifest

CALL_SECONDS = 10.0
EXPORT_SECONDS = 1800.0
"""Longest that the export of a checkpoint may take."""


@dataclass(frozen=True)
class Exported:
    """A checkpoint as a Hugging Face folder."""

    directory: Path
    step: int


def evaluation_run(config: RunFile, model: Exported, directory: Path) -> RunFile:
    """The run file of the services that evaluate `model`: the run's evaluations, engine, router and reward."""
    if not config.evaluation:
        raise ConfigError(
            f"run {config.run.name!r} has no [[evaluation]] in its run file, and so nothing says what to evaluate on"
        )
    tree = config.model_dump(mode="json")
    data = {key: tree["data"][key] for key in ("chat_template", "max_prompt_tokens", "max_malformed")}
    rollout = {key: tree["rollout"][key] for key in ("max_in_flight", "group_deadline_seconds", "max_attempts")}
    evaluations = [{**item, "every_steps": 0} for item in tree["evaluation"]]
    return parse({
        "run": {"name": config.run.name, "directory": str(directory), "seed": config.run.seed, "steps": 1},
        "model": {"path": str(model.directory)},
        # Nothing is trained: the data of an evaluation stand in for those of the run.
        "data": {**data, "source": evaluations[0]["source"]},
        "rollout": {**rollout, "groups_per_step": 1, "samples_per_group": 1, "sampling": {"max_new_tokens": 1}},
        "evaluation": evaluations,
        "engine": {**tree["engine"], "replicas": max(1, config.engine.replicas), "record_routing": False},
        **{key: tree[key] for key in ("router", "reward", "weights", "telemetry")},
        "launcher": {**tree["launcher"], "redis_url": ""},
    })  # fmt: skip


async def export_checkpoint(config: RunFile, step: int, directory: Path) -> Exported:
    """Write a checkpoint (step 0: the newest) as a model folder; ConfigError with the reason when there is none."""
    # A process of its own: the command line itself runs where torch is not installed.
    command = [sys.executable, "-m", "services.trainer.export", str(config.directory / "config.json"), str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    process = await asyncio.create_subprocess_exec(
        *command, "--step", str(step), env=environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(EXPORT_SECONDS):
            output, _ = await process.communicate()
    except TimeoutError as error:
        raise ConfigError(f"the export into {directory} took longer than {EXPORT_SECONDS:g} s") from error
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise ConfigError(output.decode(errors="replace").strip() or f"export ended with {process.returncode}")
    return Exported(directory, int(json.loads((directory / EXPORT_MARKER).read_text())["step"]))


@asynccontextmanager
async def evaluation_services(config: RunFile, step: int, notify: Notify) -> AsyncIterator[tuple[Launcher, Exported]]:
    """Services that serve a checkpoint of the run, until the end of the block."""
    folder = config.directory / "evaluations" / f"step-{step}" if step else config.directory / "evaluations" / "newest"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    notify("exporting the checkpoint")
    model = await export_checkpoint(config, step, folder / "model")
    launcher = Launcher(evaluation_run(config, model, folder / "services"), notify, EVALUATING)
    try:
        await launcher.start()
        await _publish(launcher, model)
        yield launcher, model
    finally:
        await launcher.stop()
        shutil.rmtree(folder / "model", ignore_errors=True)


async def _publish(launcher: Launcher, model: Exported) -> None:
    """Make the model the first weight version. Production is paused before that, as it would begin with it."""
    config = launcher.config
    async with open_channel(launcher.addresses["rollout-0"]) as channel:
        rollout: Any = rollout_grpc.RolloutServiceStub(channel)
        pause = rollout_pb.PauseProductionRequest(request_id=new_id(), reason="evaluation of a checkpoint")
        await rollout.PauseProduction(pause, timeout=CALL_SECONDS)
    table = config.weights.transport
    transport = make_plugin("transport", table, "weights.transport", config.directory, config.run.name)
    run_id = config.run.name
    async with open_channel(launcher.addresses["coordinator-0"]) as channel:
        stub: Any = pb_grpc.CoordinatorServiceStub(channel)
        acquire = pb.AcquireTrainerRequest(request_id=new_id(), run_id=run_id, incarnation=new_id())
        fence = (await stub.AcquireTrainer(acquire, timeout=CALL_SECONDS)).fence
        manifest = await asyncio.to_thread(_describe, model)
        prepare = pb.PrepareVersionRequest(
            request_id=new_id(), run_id=run_id, fence=fence, step=model.step, digest=manifest.digest,
            kind=weights_pb2.WEIGHT_KIND_FULL, transport=table.name,
        )  # fmt: skip
        number = (await stub.PrepareVersion(prepare, timeout=CALL_SECONDS)).version.weight_version
        uri = await asyncio.to_thread(_place, transport, model, manifest.model_copy(update={"weight_version": number}))
        num_bytes = sum(item.num_bytes for item in manifest.files)
        commit = pb.CommitVersionRequest(
            request_id=new_id(), run_id=run_id, fence=fence, weight_version=number, uri=uri, num_bytes=num_bytes
        )
        await stub.CommitVersion(commit, timeout=CALL_SECONDS)


def _describe(model: Exported) -> Manifest:
    return Manifest.describe(model.directory, 1, model.step, "full")


def _place(transport: Any, model: Exported, manifest: Manifest) -> str:
    """Readers check the copies against the manifest, which is that of the model's own files."""
    stage: Path = transport.stage(manifest.weight_version)
    for path in model.directory.glob("*.safetensors"):
        shutil.copyfile(path, stage / path.name)
    manifest.write(stage)
    return transport.publish(stage, manifest.weight_version)
