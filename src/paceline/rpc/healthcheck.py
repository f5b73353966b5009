"""`python -m paceline.rpc.healthcheck host:port`: exits with 0 when the service there serves; for container checks."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING


def check(address: str, timeout: float) -> str:
    """What is wrong with the service at `address`; empty when it serves."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            status = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout).status
        except grpc.RpcError as error:
            return f"{address} does not answer: {error.code().name}"
    return "" if status == SERVING else f"{address} is {health_pb2.HealthCheckResponse.ServingStatus.Name(status)}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m paceline.rpc.healthcheck", description=__doc__)
    parser.add_argument("address", help="host:port of the gRPC server")
    parser.add_argument("--timeout", type=float, default=3.0, help="seconds")
    arguments = parser.parse_args()
    fault = check(arguments.address, arguments.timeout)
    if fault:
        print(fault, file=sys.stderr)
    sys.exit(1 if fault else 0)


if __name__ == "__main__":
    main()
