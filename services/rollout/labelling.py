"""From a labelled example to tokens and a mask over those to be learned: what the assistant says, and nothing else.

A prompt is tokenized alone, as it is when the model is asked later, so that no token reaches across its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.api.common.v1 import reward_pb2
from paceline.config.data import DataConfig
from paceline.ids import sample_id
from paceline.prompts.source import Prompt
from paceline.samples import COMPLETED, TRUNCATED, Sample
from paceline.tokenizer import TemplateError, Tokenizer
from services.rollout.episodes.base import GroupTask, Refused

GIVEN_VERSION = 1
"""Weight version that given tokens carry: no engine made them, and the run's own versions begin with it."""
UNUSABLE = ("malformed_example", "chat_template")
"""Reasons that speak against the run file rather than against one example."""
Message = Mapping[str, Any]


@dataclass
class Labelled:
    """Token ids, and which of them are learned."""

    token_ids: list[int]
    learned: list[bool]
    truncated: bool = False

    def add(self, ids: Sequence[int], learned: bool) -> None:
        """Append tokens that are all learned, or none of them."""
        self.token_ids += ids
        self.learned += [learned] * len(ids)


class Labeller:
    """Makes examples of one run."""

    def __init__(self, tokenizer: Tokenizer, data: DataConfig, append_eos: bool = True) -> None:
        self._tokenizer = tokenizer
        self._data = data
        self._append_eos = append_eos
        self._ends = frozenset(tokenizer.eos_token_ids)

    def example(self, prompt: Prompt, completion: Any, field: str, last_turn_only: bool = False) -> Labelled:
        """A prompt with its completion (text, or messages; None for a conversation that is complete already).

        Refused with the reason malformed_example, chat_template, nothing_to_learn or example_too_long.
        """
        head: list[Message] = list(prompt.messages)
        if completion is None and not any(message.get("role") == "assistant" for message in head):
            raise Refused(
                "malformed_example",
                f"example {prompt.prompt_id} has no field {field!r}, nor an assistant's message in its prompt; its "
                f"fields are {', '.join(sorted(prompt.metadata)) or 'none'}",
            )
        if not (head or self._data.chat_template or isinstance(completion, list)):
            return self._bounded(prompt, self._plain(prompt, completion, field))
        head = head or [{"role": "user", "content": prompt.text}]
        messages = [*head, *_continuation(prompt, head, completion, field)]
        first = 0 if completion is None else len(head)
        tools = prompt.metadata.get("tools")
        try:
            found = self._conversation(prompt, messages, first, last_turn_only, {"tools": tools} if tools else {})
        except TemplateError as error:
            raise Refused("chat_template", f"example {prompt.prompt_id}: {error}") from error
        return self._bounded(prompt, found)

    def _plain(self, prompt: Prompt, completion: Any, field: str) -> Labelled:
        if not isinstance(completion, str):
            raise Refused("malformed_example", f"example {prompt.prompt_id}: {field!r} is {completion!r}, not a text")
        found = Labelled([], [])
        found.add(self._tokenizer.encode(prompt.text), False)
        ids = self._tokenizer.encode(completion)
        if self._append_eos and self._ends and (not ids or ids[-1] not in self._ends):
            ids = [*ids, self._tokenizer.eos_token_ids[0]]
        found.add(ids, True)
        return found

    def _conversation(
        self, prompt: Prompt, messages: list[Message], first: int, last_turn_only: bool, variables: dict[str, Any]
    ) -> Labelled:
        """The whole conversation rendered once, and cut where the template would have asked the assistant to speak."""
        text = self._tokenizer.render_chat(messages, add_generation_prompt=False, **variables)
        turns = [number for number, message in enumerate(messages) if message.get("role") == "assistant"]
        learned = [number for number in turns if number >= first and messages[number].get("weight", 1) != 0]
        learned = learned[-1:] if last_turn_only else learned
        starts: list[tuple[int, int]] = []
        for number in turns:
            before = self._tokenizer.render_chat(messages[:number], **variables)
            if text.startswith(before):
                starts.append((number, len(before)))
            elif number in learned:
                raise TemplateError(
                    f"the template renders what comes before message {number} otherwise once that message is there, so "
                    "the assistant's tokens cannot be told; make an example of each turn"
                )
        found = Labelled([], [])
        found.add(self._tokenizer.encode(text[: starts[0][1] if starts else len(text)]), False)
        ends = [*(start for _, start in starts[1:]), len(text)]
        for (number, start), end in zip(starts, ends, strict=True):
            if number in learned:
                self._turn(found, messages, number, text, (start, end), variables)
            else:
                found.add(self._tokenizer.encode(text[start:end]), False)
        return found

    def _turn(
        self, found: Labelled, messages: list[Message], number: int, text: str, part: tuple[int, int],
        variables: dict[str, Any],
    ) -> None:  # fmt: skip
        """Add the text from where an assistant begins to speak. Learned is what it would generate: up to the token
        that ends its turn, or, in a template without one, up to the end of the message."""
        start, end = part
        ids = self._tokenizer.encode(text[start:end])
        stop = next((place for place, token in enumerate(ids) if token in self._ends), None)
        if stop is not None:
            found.add(ids[: stop + 1], True)
            found.add(ids[stop + 1 :], False)
            return
        whole = self._tokenizer.render_chat(messages[: number + 1], add_generation_prompt=False, **variables)
        if not text.startswith(whole):
            raise TemplateError(f"the end of message {number} cannot be told: no end-of-sequence token follows it")
        found.add(self._tokenizer.encode(text[start : len(whole)]), True)
        found.add(self._tokenizer.encode(text[len(whole) : end]), False)

    def _bounded(self, prompt: Prompt, found: Labelled) -> Labelled:
        if found.learned:
            found.learned[0] = False  # Nothing predicts the first token.
        if not any(found.learned):
            raise Refused("nothing_to_learn", f"example {prompt.prompt_id} has no token to learn")
        count, most = len(found.token_ids), self._data.max_example_tokens
        if count <= most:
            return found
        if self._data.overlong == "drop" or not any(found.learned[:most]):
            raise Refused(
                "example_too_long", f"example {prompt.prompt_id} has {count} tokens; data.max_example_tokens = {most}"
            )
        return Labelled(found.token_ids[:most], found.learned[:most], truncated=True)


def _continuation(prompt: Prompt, head: list[Message], completion: Any, field: str) -> list[Message]:
    """The messages that follow the prompt's. A completion that repeats the prompt's messages is cut to what follows."""
    if completion is None:
        return []
    if isinstance(completion, str):
        return [{"role": "assistant", "content": completion}]
    if isinstance(completion, list) and all(isinstance(item, dict) and "role" in item for item in completion):
        return completion[len(head) :] if completion[: len(head)] == head else completion
    raise Refused(
        "malformed_example",
        f"example {prompt.prompt_id}: {field!r} must be a text or a list of messages with a 'role'",
    )


def given_sample(
    task: GroupTask, index: int, example: Labelled, tokenizer: Tokenizer, label: float | None = None
) -> Sample:
    """The sample of a labelled example: no engine gave its tokens a log-probability.

    A preference's label is its reward; other examples have none.
    """
    name = sample_id(task.group_id, index)
    mask = np.asarray(example.learned, dtype=np.uint8)
    learned = [token for token, wanted in zip(example.token_ids, example.learned, strict=True) if wanted]
    return Sample(
        sample_id=name, trajectory_id=name, token_ids=np.asarray(example.token_ids, dtype=np.int32), loss_mask=mask,
        sampler_logprobs=np.zeros(len(mask), dtype=np.float32), version_spans=[(GIVEN_VERSION, len(learned))],
        status=TRUNCATED if example.truncated else COMPLETED, temperature=1.0,
        text=tokenizer.decode(learned, skip_special=True),
        reward=reward_pb2.Reward() if label is None else reward_pb2.Reward(value=label),
    )  # fmt: skip
