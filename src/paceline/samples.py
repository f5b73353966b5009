"""Samples as Python objects: built by rollout, read by the trainer, checked at each boundary."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from paceline import arrays
from paceline.api.common.v1 import array_pb2, reward_pb2, sample_pb2
from paceline.ids import GroupId

COMPLETED = sample_pb2.SAMPLE_STATUS_COMPLETED
TRUNCATED = sample_pb2.SAMPLE_STATUS_TRUNCATED
ABORTED = sample_pb2.SAMPLE_STATUS_ABORTED
FAILED = sample_pb2.SAMPLE_STATUS_FAILED


class InvalidSample(ValueError):
    """A group or sample does not hold together; the text names the sample, the field and the two numbers."""


@dataclass
class Sample:
    """One token sequence to train on. The three arrays have shape [num_tokens]; see sample.proto for each field."""

    sample_id: str
    trajectory_id: str
    token_ids: np.ndarray
    """int32 [num_tokens]"""
    loss_mask: np.ndarray
    """uint8 [num_tokens]"""
    sampler_logprobs: np.ndarray
    """float32 [num_tokens], natural log, 0 where loss_mask is 0"""
    version_spans: list[tuple[int, int]]
    """(weight_version, num_tokens) over the sampled tokens"""
    status: int
    temperature: float
    seed: int = 0
    text: str = ""
    engine_id: str = ""
    reward: reward_pb2.Reward = field(default_factory=reward_pb2.Reward)
    counters: dict[str, int] = field(default_factory=dict)
    blobs: dict[str, array_pb2.BlobReference] = field(default_factory=dict)
    """Where large arrays are, by name"""
    attached: dict[str, np.ndarray] = field(default_factory=dict)
    """The large arrays themselves: before they are written, and after they were read; they do not travel with it"""

    @property
    def reward_value(self) -> float | None:
        """The reward, or None when it is missing. A missing reward is not zero."""
        return self.reward.value if self.reward.WhichOneof("outcome") == "value" else None

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return int(self.loss_mask.sum())


@dataclass
class SampleGroup:
    """All samples of one prompt."""

    run_id: str
    group_id: str
    attempt: int
    samples: list[Sample]
    prompt_id: str = ""
    prompt_text: str = ""
    metadata_json: str = "{}"
    traceparent: str = ""
    finished_time: float = 0.0

    @property
    def oldest_version(self) -> int:
        """Smallest weight version behind any sampled token. InvalidSample when no token was sampled."""
        versions = [version for sample in self.samples for version, count in sample.version_spans if count > 0]
        if not versions:
            raise InvalidSample(f"group {self.group_id}: no sample has a sampled token")
        return min(versions)

    def to_wire(self) -> sample_pb2.SampleGroup:
        """Check and encode."""
        check_group(self)
        message = sample_pb2.SampleGroup(
            run_id=self.run_id, group_id=self.group_id, attempt=self.attempt, prompt_id=self.prompt_id,
            prompt_text=self.prompt_text, metadata_json=self.metadata_json, traceparent=self.traceparent,
            finished_time=self.finished_time,
        )  # fmt: skip
        for sample in self.samples:
            message.samples.append(_sample_to_wire(sample))
        return message

    @classmethod
    def from_wire(cls, message: sample_pb2.SampleGroup) -> SampleGroup:
        """Decode and check; InvalidSample for anything that does not hold together."""
        group = cls(
            run_id=message.run_id, group_id=message.group_id, attempt=message.attempt, prompt_id=message.prompt_id,
            prompt_text=message.prompt_text, metadata_json=message.metadata_json, traceparent=message.traceparent,
            finished_time=message.finished_time, samples=[_sample_from_wire(item) for item in message.samples],
        )  # fmt: skip
        check_group(group)
        return group


def check_group(group: SampleGroup) -> None:
    """InvalidSample unless ids, lengths, spans, masks and rewards hold together."""
    try:
        GroupId.parse(group.group_id)
    except ValueError as error:
        raise InvalidSample(str(error)) from error
    if not group.samples:
        raise InvalidSample(f"group {group.group_id} has no samples")
    seen: set[str] = set()
    for sample in group.samples:
        if sample.sample_id in seen:
            raise InvalidSample(f"group {group.group_id}: sample id {sample.sample_id!r} appears twice")
        seen.add(sample.sample_id)
        check_sample(sample)


def check_sample(sample: Sample) -> None:
    """InvalidSample unless lengths, mask, spans, log-probabilities and reward hold together."""
    where = f"sample {sample.sample_id}"
    count = len(sample.token_ids)
    if count == 0:
        raise InvalidSample(f"{where}: token_ids is empty")
    for name in ("loss_mask", "sampler_logprobs"):
        length = len(getattr(sample, name))
        if length != count:
            raise InvalidSample(f"{where}: {name} has {length} entries, token_ids has {count}")
    if int(sample.token_ids.min()) < 0:
        raise InvalidSample(f"{where}: token id {int(sample.token_ids.min())} is negative")
    if int(sample.loss_mask.max()) > 1:
        raise InvalidSample(f"{where}: loss_mask holds {int(sample.loss_mask.max())}; only 0 and 1 are allowed")
    spanned = sum(tokens for _, tokens in sample.version_spans)
    if spanned != sample.num_sampled:
        raise InvalidSample(f"{where}: version spans cover {spanned} tokens, loss_mask marks {sample.num_sampled}")
    if any(version < 1 or tokens < 0 for version, tokens in sample.version_spans):
        raise InvalidSample(f"{where}: version span {sample.version_spans} has a version below 1 or a negative length")
    if not np.isfinite(sample.sampler_logprobs).all():
        raise InvalidSample(f"{where}: sampler_logprobs holds a value that is not finite")
    value = sample.reward_value
    if value is not None and not math.isfinite(value):
        raise InvalidSample(f"{where}: reward {value} is not finite (INVALID_REWARD); grade it as missing instead")


def _sample_to_wire(sample: Sample) -> sample_pb2.Sample:
    return sample_pb2.Sample(
        sample_id=sample.sample_id, trajectory_id=sample.trajectory_id,
        token_ids=arrays.to_wire(sample.token_ids), loss_mask=arrays.to_wire(sample.loss_mask),
        sampler_logprobs=arrays.to_wire(sample.sampler_logprobs),
        version_spans=[sample_pb2.VersionSpan(weight_version=v, num_tokens=n) for v, n in sample.version_spans],
        status=sample.status, reward=sample.reward, temperature=sample.temperature, seed=sample.seed,  # type: ignore[arg-type]
        text=sample.text, engine_id=sample.engine_id, counters=sample.counters, blobs=sample.blobs,
    )  # fmt: skip


def _sample_from_wire(message: sample_pb2.Sample) -> Sample:
    where = f"sample {message.sample_id}"
    try:
        token_ids = arrays.from_wire(message.token_ids, f"{where}: token_ids", "int32")
        count = len(token_ids)
        loss_mask = arrays.from_wire(message.loss_mask, f"{where}: loss_mask", "uint8", count)
        logprobs = arrays.from_wire(message.sampler_logprobs, f"{where}: sampler_logprobs", "float32", count)
    except ValueError as error:
        raise InvalidSample(str(error)) from error
    return Sample(
        sample_id=message.sample_id, trajectory_id=message.trajectory_id, token_ids=token_ids, loss_mask=loss_mask,
        sampler_logprobs=logprobs, version_spans=[(s.weight_version, s.num_tokens) for s in message.version_spans],
        status=message.status, temperature=message.temperature, seed=message.seed, text=message.text,
        engine_id=message.engine_id, reward=message.reward, counters=dict(message.counters),
        blobs=dict(message.blobs),
    )  # fmt: skip
