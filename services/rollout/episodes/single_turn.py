"""The plain episode: one prompt, one answer a sample."""

from __future__ import annotations

import numpy as np

from paceline import routing
from paceline.api.common.v1 import generation_pb2 as pb
from paceline.api.common.v1 import reward_pb2
from paceline.config import StrictModel
from paceline.ids import sample_id
from paceline.plugins import registry
from paceline.samples import ABORTED, COMPLETED, FAILED, TRUNCATED, Sample
from paceline.tokenizer import TemplateError
from services.rollout.episodes.base import EpisodeContext, GroupTask, Refused
from services.rollout.generation import Sequence
from services.rollout.grading import missing
from services.rollout.sources.base import Prompt

_STATUS = {
    pb.FINISH_REASON_STOP: COMPLETED,
    pb.FINISH_REASON_LENGTH: TRUNCATED,
    pb.FINISH_REASON_ABORT: ABORTED,
}


@registry("episode").register("single_turn")
class SingleTurn:
    """All samples of a group are one request: siblings share the work of the prompt."""

    class Options(StrictModel):
        """The single_turn episode has no options; prompt and sampling come from [data] and [rollout.sampling]."""

    def __init__(self, options: Options, context: EpisodeContext) -> None:
        self._context = context
        self._tokenizer = context.tokenizer

    async def run(self, task: GroupTask) -> list[Sample]:
        prompt_ids = self.prompt_ids(task.prompt, task.sampling.max_new_tokens)
        sequences = await self._context.generation.generate(
            task.request_id, prompt_ids, task.sampling, task.seeds, task.gate, task.group_id, task.deadline.left,
            task.with_routing,
        )  # fmt: skip
        return [self._sample(task, prompt_ids, index, item) for index, item in enumerate(sequences)]

    def prompt_ids(self, prompt: Prompt, max_new_tokens: int) -> list[int]:
        """Token ids of a prompt. Refused when it is empty, too long, or no prompt for this model's template."""
        data, engine = self._context.config.data, self._context.config.engine
        text = prompt.text
        try:
            if prompt.messages:
                text = self._tokenizer.render_chat(prompt.messages)
            elif data.chat_template:
                text = self._tokenizer.render_chat([{"role": "user", "content": prompt.text}])
        except TemplateError as error:
            raise Refused("chat_template", f"prompt {prompt.prompt_id}: {error}") from error
        ids = self._tokenizer.encode(text)
        most = min(data.max_prompt_tokens, engine.max_sequence_length - max_new_tokens)
        if len(ids) > most:
            raise Refused("prompt_too_long", f"prompt {prompt.prompt_id} has {len(ids)} tokens; at most {most} fit")
        if not ids:
            raise Refused("empty_prompt", f"prompt {prompt.prompt_id} has no tokens")
        return ids

    def _sample(self, task: GroupTask, prompt_ids: list[int], index: int, sequence: Sequence) -> Sample:
        status = _STATUS.get(sequence.reason, FAILED)
        reward = reward_pb2.Reward()
        if sequence.fault or not sequence.token_ids:
            reward = missing(reward_pb2.MISSING_REASON_NOT_GRADED, sequence.fault or "no token was sampled")
            status, sequence = FAILED, Sequence(engine_id=sequence.engine_id)
        before, sampled = len(prompt_ids), len(sequence.token_ids)
        logprobs = np.zeros(before + sampled, dtype=np.float32)
        logprobs[before:] = sequence.logprobs
        mask = np.zeros(before + sampled, dtype=np.uint8)
        mask[before:] = 1
        name = sample_id(task.group_id, index)
        return Sample(
            sample_id=name, trajectory_id=name,
            token_ids=np.asarray(prompt_ids + sequence.token_ids, dtype=np.int32), loss_mask=mask,
            sampler_logprobs=logprobs, version_spans=sequence.spans, status=status,
            temperature=task.sampling.temperature, seed=task.seeds[index],
            text=self._tokenizer.decode(sequence.token_ids, skip_special=True), engine_id=sequence.engine_id,
            reward=reward, counters={"cached_tokens": sequence.num_cached_tokens},
            attached={} if sequence.routing is None else {routing.NAME: sequence.routing},
        )  # fmt: skip
