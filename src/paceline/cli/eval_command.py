"""`paceline eval [RUN] [--name NAME]`: run the evaluations of the run file now, on the live run's engines."""

from __future__ import annotations

import argparse
import asyncio

import grpc.aio
from rich.console import Console
from rich.table import Table

from paceline.api.rollout.v1 import rollout_service_pb2 as pb
from paceline.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from paceline.cli.runs import add_run_argument, find_run
from paceline.ids import new_id
from paceline.rpc.client import open_channel
from paceline.rpc.errors import from_rpc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--name", default="", help="one evaluation of the run file; default: all")
    parser.add_argument("--version", type=int, default=0, help="weight version; default: the newest")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")


def run(arguments: argparse.Namespace) -> int:
    known = find_run(arguments.run)
    return asyncio.run(_evaluate(known.address("rollout-0"), arguments, Console()))


async def _evaluate(address: str, arguments: argparse.Namespace, console: Console) -> int:
    request = pb.EvaluateRequest(request_id=new_id(), name=arguments.name, weight_version=arguments.version)
    async with open_channel(address) as channel:
        stub: pb_grpc.RolloutServiceAsyncStub = pb_grpc.RolloutServiceStub(channel)  # type: ignore[assignment]
        try:
            response = await stub.Evaluate(request, timeout=arguments.timeout)
        except grpc.aio.AioRpcError as error:
            console.print(f"[red]{from_rpc(error)}[/]", highlight=False)
            return 1
    table = Table(box=None, pad_edge=False)
    for name in ("evaluation", "version", "prompts", "missing", "values"):
        table.add_column(name, header_style="dim")
    for result in response.results:
        values = ", ".join(f"{key} {value:.3f}" for key, value in sorted(result.values.items()))
        table.add_row(result.name, str(result.weight_version), str(result.num_prompts), str(result.num_missing), values)
    console.print(table)
    return 0
