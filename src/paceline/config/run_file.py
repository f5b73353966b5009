"""The run file: one TOML, one table a section, checked whole; each fault gets a line with the key and the fix."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from paceline.config import kinds
from paceline.config.base import PluginTable, StrictModel
from paceline.config.data import DataConfig, EvaluationConfig, RolloutConfig
from paceline.config.errors import ConfigError
from paceline.config.services import (
    DashboardConfig,
    EngineConfig,
    GatewayConfig,
    LauncherConfig,
    ModelConfig,
    RewardConfig,
    RouterConfig,
    TelemetryConfig,
    WeightsConfig,
)
from paceline.config.trainer import TrainerConfig
from paceline.ids import check_name


class RunConfig(StrictModel):
    """The run itself."""

    name: str
    """Run id: letters, digits, '.', '_', '-'."""
    kind: Literal["rl", "sft", "dpo"] = "rl"
    """"rl": samples and their rewards; "sft": labelled text; "dpo": preferences. The last two start no engine."""
    directory: str = ""
    """Where the run keeps everything; empty means runs/<name>."""
    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=10, ge=1)
    """Training steps of the run."""

    @field_validator("name")
    @classmethod
    def _safe(cls, value: str) -> str:
        return check_name(value, "run.name")


_ABOUT_THE_PLACE: Any = {"run": {"directory"}, "gateway": True, "dashboard": True, "telemetry": True, "launcher": True}


class RunFile(StrictModel):
    """Everything a run needs to know; each service takes its own section."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    evaluation: list[EvaluationConfig] = []
    engine: EngineConfig = EngineConfig()
    router: RouterConfig = RouterConfig()
    reward: RewardConfig = RewardConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    gateway: GatewayConfig = GatewayConfig()
    dashboard: DashboardConfig = DashboardConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    launcher: LauncherConfig = LauncherConfig()

    @property
    def directory(self) -> Path:
        """The run's folder, absolute."""
        return Path(self.run.directory or f"runs/{self.run.name}").absolute()

    def identity(self) -> dict[str, Any]:
        """What makes it this run: all but where it is kept, listened to, watched and supervised. By dotted key."""
        tree = self.model_dump(mode="json", exclude=_ABOUT_THE_PLACE)
        return dict(_leaves(tree))

    def digest(self) -> str:
        """SHA-256 of what is to be run; equal for equal content whatever the order of the file."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_kind(cls, data: Any) -> Any:
        return kinds.with_defaults(data) if isinstance(data, dict) else data

    @model_serializer(mode="wrap")
    def _only_what_applies(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """A resolved run file has no key that means nothing, so that it may be read again."""
        tree = handler(self)
        for key in kinds.inapplicable(self):
            kinds.without(tree, key)
        return tree

    @model_validator(mode="after")
    def _relations(self) -> RunFile:
        kinds.check_kind(self)
        if self.rollout.buffer_groups < self.rollout.groups_per_step:
            raise ValueError(
                f"rollout.buffer_groups = {self.rollout.buffer_groups} is below rollout.groups_per_step = "
                f"{self.rollout.groups_per_step}: a step could never fill"
            )
        if kinds.is_generated(self):
            self._check_sampling()
            self._check_routing()
        names = [item.name for item in self.evaluation]
        if len(set(names)) != len(names):
            raise ValueError(f"evaluation names must differ: {names}")
        return self

    def _check_routing(self) -> None:
        if self.trainer.routing_replay and not self.engine.record_routing:
            raise ValueError("trainer.routing_replay = true needs engine.record_routing = true")
        if self.engine.record_routing and self.rollout.dump:
            raise ValueError(
                "rollout.dump = true keeps no routing: what engine.record_routing records is removed with the "
                "checkpoint that has its step; set one of them to false"
            )
        if self.engine.record_routing and not self.trainer.routing_replay:
            raise ValueError("engine.record_routing = true has no reader; set trainer.routing_replay = true, too")

    def _check_sampling(self) -> None:
        room = self.engine.max_sequence_length - self.rollout.sampling.max_new_tokens
        if room < 1:
            raise ValueError(
                f"rollout.sampling.max_new_tokens = {self.rollout.sampling.max_new_tokens} leaves no room for a prompt "
                f"in engine.max_sequence_length = {self.engine.max_sequence_length}"
            )
        if self.rollout.sampling.temperature == 0:
            raise ValueError("rollout.sampling.temperature = 0 samples one answer only; training needs temperature > 0")
        if self.rollout.sampling.top_p < 1 or self.rollout.sampling.top_k > 0:
            raise ValueError(
                "rollout.sampling.top_p < 1 or top_k > 0 is refused for training: the trainer's softmax is over the "
                "whole vocabulary, so log-probabilities would not match the sampler's; use them in [[evaluation]]"
            )


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def load_run_file(path: Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read a run file (.toml) or a resolved configuration (.json) and apply `key=value` overrides.

    ConfigError has one line a fault: unknown keys with the nearest name, wrong values with what is allowed.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"cannot read run file {path}: {error.strerror}") from error
    try:
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {path.suffix.lstrip('.').upper()}: {error}") from error
    for override in overrides:
        _apply(raw, override)
    return parse(raw)


def parse(raw: dict[str, Any]) -> RunFile:
    """Validate a nested dictionary; ConfigError as in load_run_file."""
    try:
        return RunFile.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(describe(error, RunFile))) from error


def plugin_options(table: PluginTable, options: type[BaseModel], where: str) -> Any:
    """Validate a table's own keys by the plug-in's Options model; ConfigError names the table."""
    try:
        return options.model_validate(table.options())
    except ValidationError as error:
        lines = describe(error, options, f"{where}.")
        raise ConfigError("\n".join(lines)) from error


def describe(error: ValidationError, model: type[BaseModel], prefix: str = "") -> list[str]:
    """One line for each fault of a validation."""
    lines = []
    for item in error.errors():
        location = [str(part) for part in item["loc"]]
        key = (prefix + ".".join(location)).removesuffix(".")
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {key!r}{_nearest(model, location)}")
        elif item["type"] == "missing":
            lines.append(f"missing key {key!r}")
        elif item["type"] == "value_error":
            text = item["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {text}" if key else text)
        else:
            lines.append(f"{key} = {item['input']!r}: {item['msg']}")
    return lines


def _nearest(model: type[BaseModel], location: list[str]) -> str:
    names = _field_names(model, location[:-1])
    close = difflib.get_close_matches(location[-1], names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]!r}?"
    everywhere = {path.rsplit(".", 1)[-1]: path for path in _all_keys(model)}
    close = difflib.get_close_matches(location[-1], list(everywhere), n=1, cutoff=0.75)
    if close:
        return f"; did you mean {everywhere[close[0]]!r}?"
    return f"; known here: {', '.join(sorted(names))}" if names else ""


def _field_names(model: Any, path: list[str]) -> list[str]:
    """Field names of the model at `path`, looking through lists and optionals."""
    for part in path:
        if part.isdigit():
            continue
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            continue
        model = _model_in(field.annotation)
        if model is None:
            return []
    return list(model.model_fields)


def _all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key below a model."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        keys.append(f"{prefix}{name}")
        inner = _model_in(field.annotation)
        if inner is not None:
            keys += _all_keys(inner, f"{prefix}{name}.")
    return keys


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _model_in(argument)
        if found is not None:
            return found
    return None


def _apply(raw: dict[str, Any], override: str) -> None:
    """Set one dotted key. The value is TOML where it parses (numbers, lists, quoted text), else text as it stands."""
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"override {override!r} is not of the form key=value, as in trainer.optimizer.learning_rate=1e-4"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    parts = key.split(".")
    table: Any = raw
    for depth, part in enumerate(parts[:-1]):
        if isinstance(table, list) and part.isdigit() and int(part) < len(table):
            table = table[int(part)]
        elif isinstance(table, dict):
            table = table.setdefault(part, {})
        else:
            raise ConfigError(f"override {override!r}: {'.'.join(parts[: depth + 1])!r} is not a table")
    if isinstance(table, list) and parts[-1].isdigit() and int(parts[-1]) < len(table):
        table[int(parts[-1])] = parsed
    elif isinstance(table, dict):
        table[parts[-1]] = parsed
    else:
        raise ConfigError(f"override {override!r}: {'.'.join(parts[:-1])!r} is not a table")
