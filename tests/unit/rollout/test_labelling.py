"""Labelled examples: which tokens they become, and that only what the assistant says is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from paceline.config.data import DataConfig
from paceline.prompts.source import Prompt
from paceline.tokenizer import Tokenizer
from services.rollout.episodes.base import Refused
from services.rollout.labelling import Labelled, Labeller

# As newer models have it: tool results that follow one another are one turn of the user, and what the assistant thought
# is shown only after the last question, or where nothing follows.
THINKING = (
    "{%- set last = namespace(question=0) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set last.question = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- if tools %}{{ '<|start|>system\n' ~ (tools | tojson) ~ '<|end|>\n' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}"
    "{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|start|>user' }}{%- endif %}"
    "{{ '\n[' ~ m.content ~ ']' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|end|>\n' }}{%- endif %}"
    "{%- elif m.role == 'assistant' %}{{ '<|start|>assistant\n' }}"
    "{%- if loop.index0 > last.question and (loop.last or m.thought) %}{{ '(' ~ (m.thought or '') ~ ')' }}{%- endif %}"
    "{{ m.content }}{%- for call in m.tool_calls or [] %}{{ '{' ~ call.name ~ '}' }}{%- endfor %}{{ '<|end|>\n' }}"
    "{%- else %}{{ '<|start|>' ~ m.role ~ '\n' ~ m.content ~ '<|end|>\n' }}{%- endif %}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|start|>assistant\n' }}{%- endif %}"
)
PLAIN = (
    "{%- for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'assistant: ' }}{%- endif %}"
)
COUNTING = "{{ messages | length }}" + PLAIN
TOOLS = [
    {"role": "user", "content": "weather?"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "here"}, {"name": "there"}]},
    {"role": "tool", "content": "sun"},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "mixed"},
]


def folder(path: Path, template: str) -> Path:
    """A byte-level tokenizer whose sequences end with <|end|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    raw.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    raw.save(str(path / "tokenizer.json"))
    config = {"eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.load(folder(tmp_path, THINKING))


def label(tokenizer: Tokenizer, prompt: Prompt, completion: Any = None, **data: Any) -> Labelled:
    last = data.pop("last_turn_only", False)
    config = DataConfig.model_validate({"source": {"name": "jsonl"}, **data})
    return Labeller(tokenizer, config).example(prompt, completion, "completion", last)


def spans(tokenizer: Tokenizer, example: Labelled) -> list[str]:
    """Texts of the learned stretches."""
    found: list[list[int]] = []
    for place, (token, learned) in enumerate(zip(example.token_ids, example.learned, strict=True)):
        if learned:
            if not (place and example.learned[place - 1]):
                found.append([])
            found[-1].append(token)
    return [tokenizer.decode(ids) for ids in found]


def refusal(*arguments: Any, **data: Any) -> str:
    with pytest.raises(Refused) as caught:
        label(*arguments, **data)
    return caught.value.reason


def test_plain_text_is_prompt_completion_and_the_end(tokenizer: Tokenizer) -> None:
    example = label(tokenizer, Prompt("p", text="2+2="), "4")
    assert tokenizer.decode(example.token_ids) == "2+2=4<|end|>"
    assert spans(tokenizer, example) == ["4<|end|>"]
    assert spans(tokenizer, label(tokenizer, Prompt("p", text="2+2="), "4<|end|>")) == ["4<|end|>"]


def test_parallel_tool_results_are_rendered_as_the_template_has_them(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Case L6: the ids are those of the whole conversation, and only the assistant's stretches are learned."""
    transformers = pytest.importorskip("transformers")
    example = label(tokenizer, Prompt("p", messages=tuple(TOOLS), metadata={"tools": [{"name": "here"}]}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    whole = theirs.apply_chat_template(TOOLS, tools=[{"name": "here"}], tokenize=True, return_dict=False)
    assert example.token_ids == list(whole)
    assert spans(tokenizer, example) == ["{here}{there}<|end|>", "()mixed<|end|>"]


def test_all_turns_are_learned_but_those_with_weight_0(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "no", "weight": 0},
        {"role": "user", "content": "hi?"},
        {"role": "assistant", "content": "hello", "thought": "dropped, as a question follows"},
        {"role": "user", "content": "bye"},
        {"role": "assistant", "content": "bye", "thought": "polite"},
    ]
    prompt = Prompt("p", messages=tuple(messages))
    example = label(tokenizer, prompt)
    assert tokenizer.decode(example.token_ids) == tokenizer.render_chat(messages, add_generation_prompt=False)
    assert spans(tokenizer, example) == ["hello<|end|>", "(polite)bye<|end|>"]
    assert spans(tokenizer, label(tokenizer, prompt, last_turn_only=True)) == ["(polite)bye<|end|>"]


def test_with_a_completion_only_the_completion_is_learned(tokenizer: Tokenizer) -> None:
    head = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"})
    answer = {"role": "assistant", "content": "d"}
    for completion in ("d", [answer], [*head, answer]):
        assert spans(tokenizer, label(tokenizer, Prompt("p", messages=head), completion)) == ["()d<|end|>"]
    example = label(tokenizer, Prompt("p", text="a"), "b", chat_template=True)
    assert tokenizer.decode(example.token_ids) == "<|start|>user\na<|end|>\n<|start|>assistant\n()b<|end|>\n"
    assert spans(tokenizer, example) == ["()b<|end|>"]


def test_a_template_without_an_end_token_learns_up_to_the_next_message(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder(tmp_path, PLAIN))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    example = label(tokenizer, Prompt("p", messages=(*messages, *messages)))
    assert tokenizer.decode(example.token_ids) == "user: a\nassistant: b\nuser: a\nassistant: b\n"
    assert spans(tokenizer, example) == ["b\n", "b\n"]


def test_a_template_whose_beginning_depends_on_the_end_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder(tmp_path, COUNTING))
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"})
    assert refusal(tokenizer, Prompt("p", messages=messages)) == "chat_template"


def test_what_is_too_long_is_dropped_or_cut(tokenizer: Tokenizer) -> None:
    prompt = Prompt("p", text="12345")
    assert len(label(tokenizer, prompt, "678", max_example_tokens=9).token_ids) == 9
    assert refusal(tokenizer, prompt, "678", max_example_tokens=8) == "example_too_long"
    cut = label(tokenizer, prompt, "678", max_example_tokens=7, overlong="cut")
    assert (tokenizer.decode(cut.token_ids), spans(tokenizer, cut), cut.truncated) == ("1234567", ["67"], True)
    assert refusal(tokenizer, prompt, "678", max_example_tokens=5, overlong="cut") == "example_too_long"


def test_what_is_no_example_is_named(tokenizer: Tokenizer) -> None:
    assert refusal(tokenizer, Prompt("p", text="a")) == "malformed_example"
    assert refusal(tokenizer, Prompt("p", text="a"), 7) == "malformed_example"
    assert refusal(tokenizer, Prompt("p", messages=({"role": "user", "content": "a"},))) == "malformed_example"
    silent = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0})
    assert refusal(tokenizer, Prompt("p", messages=silent)) == "nothing_to_learn"
