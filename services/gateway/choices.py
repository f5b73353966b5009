"""Tokens of the router made into the text, log-probabilities and usage of one choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.generation import join_spans, read_output
from paceline.tokenizer import Detokenizer, Tokenizer

FINISH_REASONS = {
    generation_pb.FINISH_REASON_STOP: "stop",
    generation_pb.FINISH_REASON_LENGTH: "length",
    generation_pb.FINISH_REASON_ABORT: "abort",
}


@dataclass
class Piece:
    """What one message of the router adds to a choice."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_token_ids: list[list[int]]
    top_logprobs: list[list[float]]
    finish_reason: str | None = None


@dataclass
class Choice:
    """One sample as it grows. Text leaves out the end-of-sequence token and the stop string; the tokens keep both."""

    index: int
    tokenizer: Tokenizer
    stops: Sequence[str] = ()
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_token_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(weight_version, num_tokens) over the tokens."""
    finish_reason: str | None = None
    num_cached_tokens: int = 0

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, skip_special=True)
        self._trimmer = StopTrimmer(self.stops)
        self._held: list[int] = []

    def push(self, output: generation_pb.GenerationOutput) -> Piece:
        """Add a message and return what is new. MalformedOutput when it does not hold together."""
        chunk = read_output(output)
        ids, logprobs = chunk.token_ids.tolist(), chunk.logprobs.tolist()
        top_ids = chunk.top_token_ids.tolist() if chunk.top_token_ids is not None else []
        tops = chunk.top_logprobs.tolist() if chunk.top_logprobs is not None else []
        piece = Piece(self._new_text(ids, output), ids, logprobs, top_ids, tops)
        if chunk.finish is not None:
            piece.finish_reason = self.finish_reason = FINISH_REASONS.get(chunk.finish.reason, "stop")
            self.num_cached_tokens = chunk.finish.num_cached_tokens
        self.text += piece.text
        self.token_ids += ids
        self.logprobs += logprobs
        self.top_token_ids += top_ids
        self.top_logprobs += tops
        join_spans(self.spans, chunk.spans)
        return piece

    def _new_text(self, ids: list[int], output: generation_pb.GenerationOutput) -> str:
        ids = self._held + ids
        self._held = []
        # An end-of-sequence token is text only when something follows it.
        if ids and ids[-1] in self.tokenizer.eos_token_ids:
            self._held = [ids.pop()]
        text = self._detokenizer.push(ids)
        if not output.HasField("finish"):
            return self._trimmer.push(text)
        if output.finish.reason != generation_pb.FINISH_REASON_STOP:
            text += self._detokenizer.push(self._held)
        return self._trimmer.push(text + self._detokenizer.finish()) + self._trimmer.finish()


class StopTrimmer:
    """Passes text on up to a stop string, and holds back what may turn out to be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self._stopped = False

    def push(self, text: str) -> str:
        """Text that can be shown now."""
        if self._stopped:
            return ""
        text = self._held + text
        places = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if places:
            self._stopped, self._held = True, ""
            return text[: min(places)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def usage(num_prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, object]:
    """OpenAI's usage object. Prompt tokens count once, however many choices share them."""
    completion = sum(len(choice.token_ids) for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": num_prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": max((choice.num_cached_tokens for choice in choices), default=0)},
    }


def newest_version(choices: Sequence[Choice]) -> int:
    """Newest weight version behind any token; 0 before the first."""
    return max((version for choice in choices for version, _ in choice.spans), default=0)
