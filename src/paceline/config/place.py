"""Settings of a place, not of a run: addresses and how to listen. They come from flags or PACELINE_* variables only."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field

from paceline.config.errors import ConfigError

SERVICES = ("coordinator", "dashboard", "reward", "engine", "router", "rollout", "trainer", "gateway")
"""All services, in the order in which they start."""


@dataclass(frozen=True)
class Place:
    """Where this process is, and where the others are."""

    listen: str = "127.0.0.1:0"
    advertise: str = ""
    insecure: bool = False
    member_id: str = ""
    redis_url: str = ""
    otlp: str = ""
    ready_fd: int | None = None
    parent_pid: int | None = None
    addresses: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        """Flags of every service; each has a PACELINE_<NAME> variable of the same meaning."""
        group = parser.add_argument_group("place (flag, or variable PACELINE_<NAME>)")
        env = os.environ
        group.add_argument(
            "--listen",
            default=env.get("PACELINE_LISTEN", "127.0.0.1:0"),
            help="host:port of the gRPC server; port 0 chooses",
        )
        group.add_argument(
            "--advertise",
            default=env.get("PACELINE_ADVERTISE", ""),
            help="host:port that others should dial, when not the listen address",
        )
        group.add_argument(
            "--insecure",
            action="store_true",
            default=env.get("PACELINE_INSECURE") == "1",
            help="allow listening off loopback without TLS",
        )
        group.add_argument(
            "--member-id",
            default=env.get("PACELINE_MEMBER_ID", ""),
            help="name in the run: engine-1; default <service>-0",
        )
        group.add_argument(
            "--redis-url",
            default=env.get("PACELINE_REDIS_URL", ""),
            help="redis://host:port/0 of the sample stream and the state",
        )
        group.add_argument(
            "--otlp",
            default=env.get("PACELINE_OTLP", ""),
            help="host:port of the OTLP/gRPC receiver: the dashboard's, or a collector",
        )
        for service in SERVICES:
            name = f"PACELINE_{service.upper()}_ADDR"
            group.add_argument(
                f"--{service}-addr", default=env.get(name, ""), help=f"host:port of the {service} ({name})"
            )

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Place:
        """Read parsed flags, and what only a launcher sets by variable."""
        ready = os.environ.get("PACELINE_READY_FD")
        parent = os.environ.get("PACELINE_PARENT_PID")
        return cls(
            listen=arguments.listen,
            advertise=arguments.advertise,
            insecure=arguments.insecure,
            member_id=arguments.member_id,
            redis_url=arguments.redis_url,
            otlp=arguments.otlp,
            ready_fd=int(ready) if ready else None,
            parent_pid=int(parent) if parent else None,
            addresses={service: getattr(arguments, f"{service}_addr") for service in SERVICES},
        )

    def address_of(self, service: str) -> str:
        """The address of a service, or ConfigError that names the setting."""
        address = self.addresses.get(service, "")
        if not address:
            raise ConfigError(
                f"address of the {service} is not set; pass --{service}-addr host:port "
                f"or set PACELINE_{service.upper()}_ADDR"
            )
        return address

    def require_redis_url(self) -> str:
        """The Redis URL, or ConfigError that names the setting."""
        if not self.redis_url:
            raise ConfigError("Redis is not set; pass --redis-url redis://host:port/0 or set PACELINE_REDIS_URL")
        return self.redis_url
