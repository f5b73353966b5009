"""[data], [rollout] and [[evaluation]]: what is asked, how it is sampled and in what order it is produced."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from paceline.config.base import PluginTable, StrictModel


class DataConfig(StrictModel):
    """Where prompts come from and how they become tokens."""

    source: PluginTable
    """The source and its options: {name = "jsonl", path = "..."}, "parquet", "reasoning_gym", "recorded" (groups of
    an earlier run, trained on without engines), or 'module:attribute'."""
    epochs: int = Field(default=1, ge=1)
    """How often the data is gone through; an epoch's order is drawn from run.seed + epoch."""
    shuffle: bool = True
    """Draw a new order every epoch; false keeps the source's order, which is what recorded groups default to."""
    chat_template: bool = False
    """Render the prompt as one user message by the tokenizer's chat template; false takes the text as it is."""
    max_prompt_tokens: int = Field(default=1024, ge=1)
    """Longer prompts are dropped and counted (reason prompt_too_long)."""
    max_example_tokens: int = Field(default=2048, ge=2)
    """Most tokens of a labelled example (sft, dpo), prompt included."""
    overlong: Literal["drop", "cut"] = "drop"
    """"drop": a longer example is replaced by the next one and counted (reason example_too_long); "cut": its end is cut
    off, and the record of the step has the share of such samples (truncated_fraction)."""
    max_malformed: int = Field(default=0, ge=0)
    """How many malformed records are skipped and counted before loading fails."""


class SamplingConfig(StrictModel):
    """How tokens are drawn."""

    temperature: float = Field(default=1.0, ge=0, le=10)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    """0 means off."""
    max_new_tokens: int = Field(default=64, ge=1)
    stop: list[str] = []
    """Stop strings. The tokens of the match are kept."""
    stop_token_ids: list[int] = []


class EvaluationSamplingConfig(SamplingConfig):
    """How tokens are drawn in an evaluation: greedily unless said otherwise."""

    temperature: float = Field(default=0.0, ge=0, le=10)


class RolloutConfig(StrictModel):
    """How groups are produced."""

    groups_per_step: int = Field(default=8, ge=1)
    """Groups (prompts) that one training step consumes."""
    samples_per_group: int = Field(default=8, ge=1)
    """Samples of each prompt."""
    max_staleness: Annotated[int, Field(ge=0)] | Literal["unbounded"] = 0
    """Bound on trainer version minus oldest token version at consumption. 0 is synchronous and exactly on-policy."""
    too_stale: Literal["reissue", "drop"] = "reissue"
    """What happens to a group that is older than the bound when it is claimed."""
    buffer_groups: int = Field(default=64, ge=1)
    """Most groups that wait in the stream; a full buffer blocks production."""
    max_in_flight: int = Field(default=64, ge=1)
    """Most groups being generated or graded at once."""
    group_deadline_seconds: float = Field(default=120.0, gt=0)
    """A group that is not finished by then counts as a failed attempt."""
    max_attempts: int = Field(default=3, ge=1)
    """Failed attempts after which a prompt is dead; the run goes on without it."""
    lease_seconds: float = Field(default=15.0, gt=0)
    """A group whose producer has not renewed for this long is issued again."""
    episode: PluginTable = PluginTable(name="single_turn")
    """The episode plug-in; "supervised", "preference" or "recorded" where the kind of the run says so."""
    filters: list[PluginTable] = []
    """Group filters in order: "nonzero_std", "no_missing", 'module:attribute'. What they refuse is replaced."""
    sampling: SamplingConfig = SamplingConfig()
    blobs: PluginTable = PluginTable(name="file")
    """Where arrays too big for the stream (routing) are kept until a checkpoint has the step that trains them: "file",
    in the run's folder."""
    dump: bool = False
    """Write every group that is trained to <run>/rollouts/step-<n>.jsonl, for the source "recorded"."""


class EvaluationConfig(StrictModel):
    """One evaluation on the shared engines."""

    name: str
    source: PluginTable
    num_prompts: int = Field(default=32, ge=1)
    samples_per_prompt: int = Field(default=1, ge=1)
    every_steps: int = Field(default=0, ge=0)
    """Evaluate before the first step, after every so many and after the last; 0 means only when asked."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
