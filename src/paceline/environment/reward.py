"""Reward functions: plain functions of a response, checked when their module is imported, not at the first sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, overload

ARGUMENTS = ("response", "prompt", "metadata")
"""What a reward function may ask for, by keyword: two texts, and the dictionary that the data source gave."""

_MARK = "__paceline_reward__"
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class RewardSignature:
    """What a reward function is called, and which of ARGUMENTS it takes."""

    name: str
    arguments: tuple[str, ...]


@overload
def reward(function: Function) -> Function: ...
@overload
def reward(*, name: str = "") -> Callable[[Function], Function]: ...
def reward(function: Any = None, *, name: str = "") -> Any:
    """Mark a function as a reward: `@reward` or `@reward(name="brevity")`. The function itself is returned unchanged.

    It takes any of `response`, `prompt` (str) and `metadata` (dict) by keyword, may be async, and returns a finite
    number; None, an exception, NaN or anything else makes the reward missing. `name` is the component's name in
    results, by default the function's own. TypeError when the signature asks for something else.
    """

    def mark(item: Any) -> Any:
        setattr(item, _MARK, inspect_reward(item, name))
        return item

    return mark if function is None else mark(function)


def inspect_reward(function: Callable[..., Any], name: str = "") -> RewardSignature:
    """The signature of a reward function, marked or plain. TypeError names the parameter that cannot be filled."""
    marked = getattr(function, _MARK, None)
    if marked is not None:
        return marked
    own_name = getattr(function, "__name__", type(function).__name__)
    allowed = f"a reward function takes any of {', '.join(ARGUMENTS)} by keyword"
    if not callable(function):
        raise TypeError(f"{function!r} is not a function; {allowed}")
    arguments: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments = list(ARGUMENTS)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            continue
        elif parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise TypeError(f"reward {own_name!r}: parameter {parameter.name!r} is positional-only; {allowed}")
        elif parameter.name in ARGUMENTS:
            arguments.append(parameter.name)
        elif parameter.default is inspect.Parameter.empty:
            raise TypeError(f"reward {own_name!r}: unknown parameter {parameter.name!r}; {allowed}")
    return RewardSignature(name or own_name, tuple(dict.fromkeys(arguments)))
