"""Every placement policy keeps the Protocol: it chooses a candidate, whatever the request, and loads without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config import StrictModel
from paceline.plugins import registry
from services.router.policies.base import Placing

NAMES = registry("policy").available()


@dataclass
class Place:
    """A candidate."""

    engine_id: str
    num_in_flight: int = 0
    last_placed: int = 0

    @property
    def key(self) -> tuple[str, str, str, int]:
        return (self.engine_id, f"{self.engine_id}:1", "first", 0)


def _policy(name: str, **options: Any) -> Any:
    kind = registry("policy").load(name)
    return kind(kind.Options(**options))


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_keeps_the_protocol(name: str) -> None:
    kind = registry("policy").load(name)
    assert issubclass(kind.Options, StrictModel)
    assert kind.__doc__
    with pytest.raises(ValidationError, match="no_such_option"):
        kind.Options(**{"no_such_option": 1})


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_takes_what_it_is_offered(name: str) -> None:
    policy = _policy(name)
    places = [Place(f"engine-{number}") for number in range(3)]
    for number in range(30):
        offered = places[number % 3 :]
        placing = Placing(str(number), "session" if number % 2 else "", 4, 10)
        assert policy.choose(placing, offered) in offered


@pytest.mark.parametrize("name", NAMES)
def test_requests_without_session_spread_evenly(name: str) -> None:
    policy = _policy(name)
    places = [Place(f"engine-{number}") for number in range(3)]
    for number in range(31):
        chosen = policy.choose(Placing(str(number), "", 2, 10), places)
        chosen.num_in_flight += 2
        chosen.last_placed = number
        loads = [place.num_in_flight for place in places]
        assert max(loads) - min(loads) <= 2


def test_sticky_sessions_are_bounded() -> None:
    policy = _policy("session_sticky", max_sessions=2)
    places = [Place("engine-0"), Place("engine-1", num_in_flight=5)]
    for session in ("a", "b", "c"):
        assert policy.choose(Placing("r", session, 1, 1), places) is places[0]
    places[0].num_in_flight = 9
    assert policy.choose(Placing("r", "c", 1, 1), places) is places[0]
    assert policy.choose(Placing("r", "a", 1, 1), places) is places[1]


def test_router_and_gateway_start_without_torch() -> None:
    code = f"""
import sys
for name in ("torch", "transformers", "safetensors"):
    sys.modules[name] = None
import services.router.__main__, services.gateway.__main__, paceline.testing.scripted_engine
from paceline.plugins import registry
for name in {NAMES}:
    registry("policy").load(name).Options.model_json_schema()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
