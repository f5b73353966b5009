"""What a scripted engine says, and what can go wrong with it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

from paceline.rpc import errors

Script = Callable[[Sequence[int], int, int], Sequence[int]]
"""(prompt token ids, seed, weight version) -> the tokens of one sample; cut at max_new_tokens."""


def hashed(length: int = 8, vocabulary: int = 100) -> Script:
    """Tokens that depend on prompt, seed and version only, as a real engine's do."""

    def script(prompt: Sequence[int], seed: int, weight_version: int) -> Sequence[int]:
        tokens = []
        for position in range(length):
            text = f"{list(prompt)}/{seed}/{weight_version}/{position}"
            tokens.append(int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % vocabulary)
        return tokens

    return script


def fixed(tokens: Sequence[int]) -> Script:
    """The same tokens for every sample."""
    return lambda prompt, seed, weight_version: tokens


def by_prompt(answers: dict[tuple[int, ...], Sequence[int]]) -> Script:
    """The tokens of each prompt; a prompt that is not among `answers` is INVALID_ARGUMENT."""

    def script(prompt: Sequence[int], seed: int, weight_version: int) -> Sequence[int]:
        if tuple(prompt) not in answers:
            raise errors.InvalidArgument(f"prompt_token_ids {list(prompt)} are not in the script")
        return answers[tuple(prompt)]

    return script


@dataclass
class Faults:
    """What goes wrong; change it at any time. The defaults are a sound engine."""

    die_midstream: int = 0
    """The server ends when it has produced so many tokens in all; 0 means never."""
    hang: bool = False
    """Generate and Probe never answer."""
    unavailable: bool = False
    """Generate and Probe are UNAVAILABLE."""
    garble: bool = False
    """Log-probabilities are one shorter than the tokens."""
    refuse: str = ""
    """Generate is INVALID_ARGUMENT with this text."""
    exhausted_seconds: float = 0.0
    """Generate is RESOURCE_EXHAUSTED with this retry delay."""
    label_version: int = -1
    """Version that tokens and probes are labelled with, whatever is served; 0 plays an engine that says "default"."""
    ignore_abort: bool = False
    """Abort is answered and has no effect."""

    def set(self, assignment: str) -> None:
        """Apply "name=value"; ValueError names the faults there are."""
        name, _, value = assignment.partition("=")
        known = {item.name: type(item.default) for item in fields(self)}
        if name not in known:
            raise ValueError(f"unknown fault {name!r}; there are {', '.join(known)}")
        kind = known[name]
        setattr(self, name, value in ("", "1", "true") if kind is bool else kind(value))


def scripted_logprob(token: int) -> float:
    """The log-probability that the scripted engine gives to a token."""
    return -(1 + token % 8) / 8
