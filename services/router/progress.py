"""What of each sample of a request was already sent on, so that another attempt repeats and loses nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.api.common.v1 import sample_pb2


class EngineFault(Exception):
    """An engine answered something that cannot be right; the text is the end of "engine-0 ..."."""


class Diverged(Exception):
    """A second attempt does not repeat what the first one sent."""


@dataclass
class SampleProgress:
    """One sample: what was sent of it, and where the running attempt is.

    The tokens of a sample depend on seed, prompt and weights only. So an attempt on another engine repeats what was
    sent, as long as the weights are those; the repeated part is compared and left out.
    """

    index: int
    """Position in the caller's seeds."""
    seed: int
    sent: list[int] = field(default_factory=list)
    sent_text: int = 0
    """Characters of text sent."""
    versions: set[int] = field(default_factory=set)
    """Weight versions of what was sent."""
    finished: bool = False
    diverged: bool = False
    """Ended by us because a second attempt did not repeat the first; what the engine still sends is ignored."""
    position: int = 0
    """Tokens that the running attempt has brought."""
    text_position: int = 0

    @property
    def repeatable(self) -> bool:
        """Whether another engine can repeat what was sent: all of it is of one version."""
        return len(self.versions) <= 1

    def restart(self) -> None:
        """A new attempt begins at the first token."""
        self.position = 0
        self.text_position = 0

    def accept(self, output: generation_pb.GenerationOutput) -> generation_pb.GenerationOutput | None:
        """What of an engine's message is to be sent on, None when all of it was sent before.

        EngineFault when the message does not hold together; Diverged when it differs from what was sent.
        """
        tokens = check_output(output)
        if self.finished:
            raise EngineFault(f"sent tokens of sample {self.index} after its finish")
        skip = min(max(len(self.sent) - self.position, 0), len(tokens))
        if skip:
            self._compare(output, tokens[:skip], skip)
        text_skip = min(max(self.sent_text - self.text_position, 0), len(output.text))
        self.position += len(tokens)
        self.text_position += len(output.text)
        if output.HasField("finish"):
            if self.position < len(self.sent):
                raise Diverged(f"sample {self.index} ended after {self.position} tokens; {len(self.sent)} were sent")
            self.finished = True
        elif skip == len(tokens):
            return None
        rest = _without(output, tokens, skip, text_skip) if skip or text_skip else output
        self.sent += tokens[skip:].tolist()
        self.sent_text += len(rest.text)
        self.versions.update(span.weight_version for span in rest.version_spans if span.num_tokens)
        return rest

    def aborted(self, num_prompt_tokens: int) -> generation_pb.GenerationOutput:
        """The message that ends the sample with what was sent."""
        self.finished = True
        finish = generation_pb.GenerationFinish(
            reason=generation_pb.FINISH_REASON_ABORT, num_prompt_tokens=num_prompt_tokens,
            num_generated_tokens=len(self.sent),
        )  # fmt: skip
        empty_ids, empty_logprobs = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return generation_pb.GenerationOutput(
            index=self.index, token_ids=arrays.to_wire(empty_ids), sampler_logprobs=arrays.to_wire(empty_logprobs),
            finish=finish,
        )  # fmt: skip

    def _compare(self, output: generation_pb.GenerationOutput, tokens: np.ndarray, skip: int) -> None:
        versions, left = set(), skip
        for span in output.version_spans:
            if left > 0 and span.num_tokens > 0:
                versions.add(span.weight_version)
            left -= span.num_tokens
        if versions != self.versions:
            raise Diverged(
                f"sample {self.index} was begun by {sorted(self.versions)} and repeated by {sorted(versions)}"
            )
        if tokens.tolist() != self.sent[self.position : self.position + skip]:
            raise Diverged(f"sample {self.index} was repeated with other tokens")


def check_output(output: generation_pb.GenerationOutput) -> np.ndarray:
    """The int32 token ids of a message whose parts have one length; EngineFault names the two numbers otherwise."""
    if not output.HasField("token_ids"):
        if output.HasField("finish") and not output.version_spans:
            return np.zeros(0, np.int32)
        raise EngineFault("sent a message without token_ids")
    try:
        tokens = arrays.from_wire(output.token_ids, "token_ids", "int32")
        tokens = arrays.from_wire(output.token_ids, "token_ids", "int32", tokens.size)
        arrays.from_wire(output.sampler_logprobs, "sampler_logprobs", "float32", tokens.size)
    except ValueError as error:
        raise EngineFault(f"sent a malformed message: {error}") from error
    spanned = sum(span.num_tokens for span in output.version_spans)
    if spanned != tokens.size or any(span.num_tokens < 0 for span in output.version_spans):
        raise EngineFault(f"sent {tokens.size} tokens with version spans over {spanned}")
    return tokens


def _without(
    output: generation_pb.GenerationOutput, tokens: np.ndarray, skip: int, text_skip: int
) -> generation_pb.GenerationOutput:
    """A copy of a message without its first tokens and characters."""
    rest = generation_pb.GenerationOutput()
    rest.CopyFrom(output)
    rest.text = output.text[text_skip:]
    if not skip:
        return rest
    rest.token_ids.CopyFrom(arrays.to_wire(tokens[skip:]))
    for name in ("sampler_logprobs", "top_token_ids", "top_logprobs"):
        if output.HasField(name):
            getattr(rest, name).CopyFrom(arrays.to_wire(arrays.from_wire(getattr(output, name), name)[skip:]))
    del rest.version_spans[:]
    left = skip
    for span in output.version_spans:
        dropped = min(left, span.num_tokens)
        left -= dropped
        if span.num_tokens > dropped:
            kept = sample_pb2.VersionSpan(weight_version=span.weight_version, num_tokens=span.num_tokens - dropped)
            rest.version_spans.append(kept)
    return rest
