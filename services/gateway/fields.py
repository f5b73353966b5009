"""Reading of a JSON request: every field is checked by name, and none is ignored in silence."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

from starlette.requests import Request

from services.gateway.problems import Problem, invalid

MAX_BODY_BYTES = 8 * 2**20

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "cache_salt", "priority", "spaces_between_special_tokens", "reasoning_effort", "verbosity",
        "parallel_tool_calls",
    }
)  # fmt: skip
"""Fields that clients send and that change nothing here."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, None), "frequency_penalty": (0, None), "repetition_penalty": (1, None), "min_p": (0, None),
    "logit_bias": ({}, None), "response_format": ({"type": "text"}, None), "tools": ([], None),
    "tool_choice": ("none", "auto", None), "functions": ([], None), "modalities": (["text"], None), "audio": (None,),
    "best_of": (1, None), "skip_special_tokens": (True, None), "include_stop_str_in_output": (False, None),
    "min_tokens": (0, None), "echo": (False, None), "suffix": (None, ""), "prediction": (None,),
    "web_search_options": (None,),
}  # fmt: skip
"""Fields that are accepted at a value that asks for nothing; at any other they are refused."""


async def read_json(request: Request, limit: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """The JSON object of a request. Problem 413 when it is larger than `limit` bytes, 400 when it is not an object."""
    declared = request.headers.get("content-length", "")
    body = bytearray()
    if not (declared.isdigit() and int(declared) > limit):
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                break
    if len(body) > limit or (declared.isdigit() and int(declared) > limit):
        raise Problem(413, f"the request body is larger than {limit} bytes", code="request_too_large")
    try:
        found = json.loads(bytes(body))
    except ValueError as error:
        raise Problem(400, f"the request body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(found, dict):
        raise Problem(400, f"the request body is a JSON {type(found).__name__}, not an object", code="invalid_json")
    return found


class Fields:
    """The fields of one request. Each getter checks one field and raises Problem 400 with its name."""

    def __init__(self, raw: dict[str, Any], known: Iterable[str]) -> None:
        self._raw = raw
        known = set(known)
        for name, value in raw.items():
            if name in known or name in HARMLESS:
                continue
            if name not in NEUTRAL:
                raise invalid(name, "unknown field; remove it", "unknown_parameter")
            if value not in NEUTRAL[name]:
                raise invalid(name, f"{value!r} is not supported here; leave the field out", "unsupported_parameter")

    def get(self, name: str) -> Any:
        """The value as sent, None when absent."""
        return self._raw.get(name)

    def number(self, name: str, default: float, low: float, high: float, above: bool = False) -> float:
        """A finite number in [low, high], or in (low, high] with `above`."""
        value = self._raw.get(name)
        if value is None:
            return default
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not good or not low <= value <= high or (above and value == low):
            bounds = f"above {low:g}, at most {high:g}" if above else f"from {low:g} to {high:g}"
            raise invalid(name, f"{value!r} is not a number {bounds}", "invalid_value")
        return float(value)

    def integer(self, name: str, default: int | None, low: int, high: int) -> int | None:
        """A whole number in [low, high]."""
        value = self._raw.get(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise invalid(name, f"{value!r} is not a whole number from {low} to {high}", "invalid_value")
        return value

    def flag(self, name: str) -> bool:
        """True or false; false when absent."""
        value = self._raw.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise invalid(name, f"{value!r} is not true or false", "invalid_value")
        return value

    def texts(self, name: str, most: int) -> list[str]:
        """A text, or a list of at most `most` texts, none of them empty."""
        value = self._raw.get(name)
        items = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) and item for item in items):
            raise invalid(name, f"{value!r} is neither a text nor a list of texts", "invalid_value")
        if len(items) > most:
            raise invalid(name, f"{len(items)} entries; at most {most} are taken", "invalid_value")
        return items

    def integers(self, name: str, most: int) -> list[int]:
        """A list of token ids."""
        value = self._raw.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**31 for item in value
        ):
            raise invalid(name, "not a list of token ids", "invalid_value")
        if len(value) > most:
            raise invalid(name, f"{len(value)} entries; at most {most} are taken", "invalid_value")
        return value
