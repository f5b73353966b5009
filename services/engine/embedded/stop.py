"""When a sample ends: end-of-sequence and stop ids, stop strings in the growing text, and the token limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from services.engine.generation import FinishReason, Sampling


class TextStream(Protocol):
    """Turns ids into text, holding back unfinished characters: paceline.tokenizer.Detokenizer."""

    def push(self, ids: Sequence[int]) -> str: ...

    def finish(self) -> str: ...


class StopWatch:
    """Watches one sample. `text` collects what the caller has not taken yet."""

    def __init__(self, sampling: Sampling, eos_token_ids: Sequence[int], stream: TextStream) -> None:
        self._sampling = sampling
        self._stop_ids = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else frozenset(eos_token_ids))
        self._stream = stream
        self._tail = ""
        self._keep = max((len(item) for item in sampling.stop), default=1) - 1
        self._unread: list[int] = []
        self._text = ""

    def add(self, token_id: int, num_generated: int) -> tuple[FinishReason, str] | None:
        """Take the next token; `num_generated` counts it. (reason, what matched) when the sample ends with it."""
        self._unread.append(token_id)
        if token_id in self._stop_ids:
            return "stop", str(token_id)
        if self._sampling.stop:
            matched = self._match()
            if matched:
                return "stop", matched
        if num_generated >= self._sampling.max_new_tokens:
            return "length", ""
        return None

    def take_text(self, last: bool) -> str:
        """Text since the last call; `last` also gives out what was held back."""
        self._read()
        if last:
            self._text += self._stream.finish()
        text, self._text = self._text, ""
        return text

    def _read(self) -> str:
        if not self._unread:
            return ""
        text = self._stream.push(self._unread)
        self._unread.clear()
        self._text += text
        return text

    def _match(self) -> str:
        window = self._tail + self._read()
        found = [(window.find(item), item) for item in self._sampling.stop]
        found = [item for item in found if item[0] >= 0]
        self._tail = (
            window[len(window) - self._keep :]
            if self._keep and len(window) > self._keep
            else (window if self._keep else "")
        )
        return min(found)[1] if found else ""
