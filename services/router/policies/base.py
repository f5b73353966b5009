"""What a placement policy is. The router has already left out every engine that may not serve the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar


@dataclass(frozen=True)
class Placing:
    """What a policy may know of a request."""

    request_id: str
    session_id: str
    num_samples: int
    num_prompt_tokens: int


class Candidate(Protocol):
    """One data-parallel rank of an engine that may take the request now."""

    @property
    def key(self) -> tuple[str, str, str, int]:
        """(engine_id, address, incarnation, dp_rank); a restarted engine has another key."""
        ...

    @property
    def num_in_flight(self) -> int:
        """Samples placed there by this router and not finished."""
        ...

    @property
    def last_placed(self) -> int:
        """Order number of the last request placed there; the smaller, the longer ago."""
        ...


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Chooses among candidates. A plug-in of kind "policy": a class with a nested `Options(StrictModel)`.

    `choose` is called in the event loop and must not block.
    """

    Options: Any

    def __init__(self, options: Any) -> None: ...

    def choose(self, placing: Placing, candidates: Sequence[C]) -> C:
        """One of `candidates`, which is never empty."""
        ...
