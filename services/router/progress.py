"""What of each sample of a request was already sent on, so that another attempt repeats and loses nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.generation import Chunk, MalformedOutput, read_output, without_first


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
    sent_rows: int = 0
    """Rows of routing sent."""
    row_position: int = 0

    @property
    def repeatable(self) -> bool:
        """Whether another engine can repeat what was sent: all of it is of one version."""
        return len(self.versions) <= 1

    def restart(self) -> None:
        """A new attempt begins at the first token."""
        self.position = 0
        self.text_position = 0
        self.row_position = 0

    def accept(self, output: generation_pb.GenerationOutput) -> generation_pb.GenerationOutput | None:
        """What of an engine's message is to be sent on, None when all of it was sent before.

        EngineFault when the message does not hold together; Diverged when it differs from what was sent.
        """
        chunk = _read(output)
        tokens = chunk.token_ids
        if self.finished:
            raise EngineFault(f"sent tokens of sample {self.index} after its finish")
        skip = min(max(len(self.sent) - self.position, 0), len(tokens))
        if skip:
            self._compare(chunk, skip)
        text_skip = min(max(self.sent_text - self.text_position, 0), len(output.text))
        self.position += len(tokens)
        self.text_position += len(output.text)
        rows = 0 if chunk.routing is None else len(chunk.routing)
        row_skip = min(max(self.sent_rows - self.row_position, 0), rows)
        self.row_position += rows
        if output.HasField("finish"):
            if self.position < len(self.sent):
                raise Diverged(f"sample {self.index} ended after {self.position} tokens; {len(self.sent)} were sent")
            self.finished = True
        elif skip == len(tokens) and row_skip == rows:
            return None
        cut = skip or text_skip or row_skip
        rest = without_first(output, chunk, skip, text_skip, row_skip) if cut else output
        self.sent_rows += rows - row_skip
        self.sent += tokens[skip:].tolist()
        self.sent_text += len(rest.text)
        self.versions.update(span.weight_version for span in rest.version_spans)
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

    def _compare(self, chunk: Chunk, skip: int) -> None:
        versions, left = set(), skip
        for version, count in chunk.spans:
            if left > 0:
                versions.add(version)
            left -= count
        if versions != self.versions:
            raise Diverged(
                f"sample {self.index} was begun by {sorted(self.versions)} and repeated by {sorted(versions)}"
            )
        if chunk.token_ids[:skip].tolist() != self.sent[self.position : self.position + skip]:
            raise Diverged(f"sample {self.index} was repeated with other tokens")


def _read(output: generation_pb.GenerationOutput) -> Chunk:
    try:
        return read_output(output)
    except MalformedOutput as error:
        raise EngineFault(f"sent {error}") from error
