"""Requests and their output as the engine's parts hand them on: plain values, free of gRPC and of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from paceline.rpc import errors

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["in_place", "retract", "abort", "drain"]
"""What a pause or a weight update does to running requests, under SGLang's names."""


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are drawn. temperature 0 is greedy; top_p 1 and top_k 0 are off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True)
class Request:
    """One prompt and the samples wanted of it."""

    request_id: str
    prompt: np.ndarray
    """int32 [num_prompt_tokens], at least one."""
    seeds: tuple[int, ...]
    """One sample for each, in this order; 64 bits each."""
    sampling: Sampling = field(default_factory=Sampling)
    min_version: int = 0
    exact_version: int | None = None
    stream: bool = False
    num_top_logprobs: int = 0
    with_routing: bool = False
    """Also return the experts of each token."""


@dataclass(frozen=True)
class Finish:
    """The end of one sample."""

    reason: FinishReason
    matched_stop: str = ""
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0


@dataclass(frozen=True)
class Piece:
    """The next tokens of one sample; lists of one length."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    """Natural log at the sampling temperature, over the whole vocabulary."""
    weight_versions: list[int]
    """The version that produced each token."""
    text: str = ""
    top_token_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    finish: Finish | None = None
    routing: np.ndarray | None = None
    """The next rows of the sample's routing, see paceline.routing."""


@dataclass(frozen=True)
class Load:
    """What a backend is doing, in numbers."""

    num_running: int
    num_waiting: int
    capacity: int
    tokens_per_second: float
    cache_use: float
    """Share of the key-value cache that holds tokens, 0 to 1."""
    held_by: str = ""
    """What keeps requests from going on, for a person; empty while nothing does."""
    num_generated: int = 0
    """Tokens since the start."""
    busy_seconds: float = 0.0
    """Time spent computing them."""


@dataclass(frozen=True)
class AppliedWeights:
    """The outcome of a weight update."""

    digest: str
    """Content digest of what the backend holds now."""
    pause_seconds: float
    """How long requests were held."""


def check_gate(request: Request, weight_version: int) -> None:
    """Refuse a request that the served version may not answer.

    FailedPrecondition for a version that is not held yet, Aborted for an exact version that was left, Unavailable while
    there is none.
    """
    exact = request.exact_version
    if weight_version == 0:
        raise errors.Unavailable("engine holds no published weight version yet; try again when it is READY", 0.5)
    if exact is not None and exact < weight_version:
        raise errors.Aborted(f"gate exact_version = {exact}: the engine has left it and serves {weight_version}")
    wanted = max(request.min_version, exact or 0)
    if wanted > weight_version:
        raise errors.FailedPrecondition(
            f"gate asks for weight version {wanted}; the engine serves {weight_version} and has not applied it yet"
        )
