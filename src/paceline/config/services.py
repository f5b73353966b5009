"""[model], [engine], [router], [reward], [weights], [gateway], [dashboard], [telemetry], [launcher]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from paceline.config.base import PluginTable, StrictModel


class ModelConfig(StrictModel):
    """The model to start from."""

    path: str
    """A Hugging Face model folder: config.json, safetensors, tokenizer. Relative to where the command runs."""


class EngineConfig(StrictModel):
    """A model engine. All engines of a run are alike."""

    backend: PluginTable = PluginTable(name="embedded")
    """The engine backend with its options."""
    replicas: int = Field(default=1, ge=0)
    """How many the launcher starts. 0: engines are started elsewhere and join."""
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(default=1, ge=1)
    max_sequences: int = Field(default=128, ge=1)
    """Sequences that are decoded at once."""
    max_sequence_length: int = Field(default=512, ge=2)
    """Prompt plus new tokens of one sequence."""
    max_waiting: int = Field(default=1024, ge=1)
    """Requests that may wait for a slot; more are refused with a retry delay."""
    pause_mode: Literal["in_place", "retract", "abort", "drain"] = "in_place"
    """What a weight update does to running requests."""
    record_routing: bool = False
    """Record the experts that each token went through, for trainer.routing_replay. Only for models with experts."""


class RouterConfig(StrictModel):
    """Placement of generation requests."""

    policy: PluginTable = PluginTable(name="least_load")
    max_waiting: int = Field(default=4096, ge=1)
    probe_every_seconds: float = Field(default=5.0, gt=0)
    """How often each engine must generate a token to stay healthy."""
    probe_timeout_seconds: float = Field(default=10.0, gt=0)
    max_retries: int = Field(default=3, ge=0)
    """How often a request is placed again after its engine died."""


class GraderTable(PluginTable):
    """One grader of the reward."""

    weight: float = 1.0


class RewardConfig(StrictModel):
    """Grading."""

    graders: list[GraderTable] = []
    """The reward is the weighted sum. A missing component makes the reward missing."""
    workers: int = Field(default=1, ge=1)
    """Grader processes."""
    timeout_seconds: float = Field(default=5.0, gt=0)
    """Wall limit for one grader on one sample."""
    memory_mb: int = Field(default=2048, ge=64)
    """Address space that a grader process may use beyond its own start."""
    max_waiting: int = Field(default=4096, ge=1)


class WeightsConfig(StrictModel):
    """How published weights travel."""

    transport: PluginTable = PluginTable(name="shm")
    """"shm": files in memory of this host; "disk": files under the run's folder."""
    keep: int = Field(default=2, ge=1)
    """Published versions that are kept on the transport."""


def _host_and_port(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{value!r} is not host:port, as in 127.0.0.1:8000; port 0 chooses a free one")
    return value


Listen = Annotated[str, AfterValidator(_host_and_port)]


class GatewayConfig(StrictModel):
    """The HTTP edge."""

    enabled: bool = True
    listen: Listen = "127.0.0.1:0"
    """host:port of the HTTP server; port 0 chooses."""
    model_name: str = "policy"
    """Name under which clients ask for the model in training."""
    request_timeout_seconds: float = Field(default=120.0, gt=0)


class DashboardConfig(StrictModel):
    """The page and the OTLP receiver."""

    enabled: bool = True
    listen: Listen = "127.0.0.1:0"
    """host:port of the web page; port 0 chooses."""


class TelemetryConfig(StrictModel):
    """Traces."""

    enabled: bool = True
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of groups that are traced. Steps always are."""


class LauncherConfig(StrictModel):
    """How one machine runs everything."""

    redis_url: str = ""
    """An existing Redis or Valkey; empty starts one, with its append-only file in the run's folder."""
    start_timeout_seconds: float = Field(default=120.0, gt=0)
    """How long one service may take to be healthy."""
    stop_timeout_seconds: float = Field(default=10.0, gt=0)
    max_restarts: int = Field(default=10, ge=0)
    """Restarts of one service within five minutes before the run is given up."""
