"""`paceline eval [RUN] [--name NAME]`: the evaluations of the run file, now.

On a live run's engines; of a run that is down or has none, its newest checkpoint (or `--step`) on engines of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import grpc.aio
from rich.console import Console
from rich.table import Table

from paceline.api.coordinator.v1 import coordinator_service_pb2 as coordinator_pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from paceline.api.rollout.v1 import rollout_service_pb2 as pb
from paceline.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from paceline.cli.launch import say, shown
from paceline.cli.runs import KnownRun, add_run_argument, find_run
from paceline.config import ConfigError
from paceline.config.kinds import is_generated
from paceline.ids import new_id
from paceline.launcher.evaluation import evaluation_services
from paceline.launcher.process import StartFailed
from paceline.rpc.client import open_channel
from paceline.rpc.errors import from_rpc

CALL_SECONDS = 10.0
RESULTS = "evaluations.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--name", default="", help="one evaluation of the run file; default: all")
    parser.add_argument("--version", type=int, default=0, help="weight version of a live run; default: the newest")
    parser.add_argument(
        "--step", type=int, default=0, help="step of a checkpoint, evaluated on engines of its own; default: the newest"
    )
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")


def run(arguments: argparse.Namespace) -> int:
    known = find_run(arguments.run)
    console = Console()
    live = known.live is not None and is_generated(known.config)
    if live and not arguments.step:
        return asyncio.run(_on_live_engines(known, arguments, console))
    if arguments.version:
        raise ConfigError(
            f"--version is for the engines of a live run, and run {known.run_id!r} has none; use --step for a "
            "checkpoint"
        )
    try:
        return asyncio.run(_on_own_engines(known, arguments, console))
    except StartFailed as error:
        say(console, f"could not start: {error}")
        return 1


async def _on_live_engines(known: KnownRun, arguments: argparse.Namespace, console: Console) -> int:
    results = await _evaluate(known.address("rollout-0"), arguments, console)
    if results is None:
        return 1
    console.print(_table(results, "version", [item.weight_version for item in results]))
    return 0


async def _on_own_engines(known: KnownRun, arguments: argparse.Namespace, console: Console) -> int:
    async with evaluation_services(known.config, arguments.step, lambda text: say(console, text)) as (launcher, model):
        results = await _evaluate(launcher.addresses["rollout-0"], arguments, console)
    if results is None:
        return 1
    for result in results:
        record = {"step": model.step, "name": result.name, "time": time.time(), **dict(result.values)}
        with (known.directory / RESULTS).open("a") as file:
            file.write(json.dumps(record) + "\n")
        if known.live is not None:
            await _record(known, model.step, result)
    console.print(_table(results, "step", [model.step] * len(results)))
    say(console, f"kept in {shown(known.directory / RESULTS)}")
    return 0


async def _evaluate(address: str, arguments: argparse.Namespace, console: Console) -> list[pb.EvaluationResult] | None:
    """The results, or None when the error was shown."""
    request = pb.EvaluateRequest(request_id=new_id(), name=arguments.name, weight_version=arguments.version)
    async with open_channel(address) as channel:
        stub: pb_grpc.RolloutServiceAsyncStub = pb_grpc.RolloutServiceStub(channel)  # type: ignore[assignment]
        try:
            return list((await stub.Evaluate(request, timeout=arguments.timeout)).results)
        except grpc.aio.AioRpcError as error:
            console.print(f"[red]{from_rpc(error)}[/]", highlight=False)
            return None


async def _record(known: KnownRun, step: int, result: pb.EvaluationResult) -> None:
    """Let a run that is up know, so that the dashboard shows it."""
    record = coordinator_pb.StepRecord(
        step=step, kind=coordinator_pb.RECORD_KIND_EVALUATION, name=result.name, values=result.values
    )
    record.time.GetCurrentTime()
    request = coordinator_pb.RecordStepRequest(request_id=new_id(), run_id=known.run_id, record=record)
    async with open_channel(known.address("coordinator-0")) as channel:
        stub: Any = coordinator_grpc.CoordinatorServiceStub(channel)
        await stub.RecordStep(request, timeout=CALL_SECONDS)


def _table(results: list[pb.EvaluationResult], what: str, numbers: list[int]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("evaluation", what, "prompts", "missing", "values"):
        table.add_column(name, header_style="dim")
    for result, number in zip(results, numbers, strict=True):
        values = ", ".join(f"{key} {value:.3f}" for key, value in sorted(result.values.items()))
        table.add_row(result.name, str(number), str(result.num_prompts), str(result.num_missing), values)
    return table
