"""The tokenizer of a model folder: round trips, characters that span tokens, chat templates in a sandbox."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RawTokenizer

from paceline.config import ConfigError
from paceline.tokenizer import Detokenizer, TemplateError, Tokenizer

TEMPLATE = (
    "{%- for message in messages %}{% if message['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('no role ' + message['role']) }}{% endif %}"
    "<|start|>{{ message['role'] }}\n{% generation %}{{ message['content'] }}{% endgeneration %}{{ eos_token }}\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def byte_level_folder(folder: Path) -> Path:
    """A byte-level model folder: one token a byte, and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    raw.add_special_tokens([AddedToken("<|start|>", special=True), AddedToken("<|end|>", special=True)])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|end|>"}}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 257]}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(byte_level_folder(tmp_path_factory.mktemp("model")))


def test_text_round_trips_and_nothing_is_added(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("7+9=\n")) == "7+9=\n"
    assert len(tokenizer.encode("abc")) == 3
    assert tokenizer.encode("a<|end|>")[-1] == 257
    assert tokenizer.decode([257]) == "<|end|>"
    assert tokenizer.decode([257], skip_special=True) == ""
    assert tokenizer.vocab_size == 258
    assert tokenizer.eos_token_ids == [256, 257]


def test_the_tokenizers_own_end_token_is_added_to_the_models(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 256}))
    assert Tokenizer.load(folder).eos_token_ids == [256, 257]


@given(text=st.text(max_size=40), cut=st.integers(1, 7))
@settings(max_examples=150, deadline=None)
def test_pieces_add_up_to_the_text_and_never_split_a_character(tokenizer: Tokenizer, text: str, cut: int) -> None:
    ids = tokenizer.encode(text)
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(ids[i : i + cut]) for i in range(0, len(ids), cut)]
    assert text.startswith("".join(pieces)), "what was sent is never taken back"
    pieces.append(stream.finish())
    assert "".join(pieces) == text == stream.text


def test_bytes_of_an_unfinished_character_are_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab\u20ac")
    stream = Detokenizer(tokenizer)
    assert stream.push(ids[:4]) == "ab"
    assert stream.push(ids[4:]) == "\u20ac"
    assert stream.finish() == ""
    cut = Detokenizer(tokenizer)
    assert cut.push(ids[:3]) == "ab"
    assert cut.finish() == "\ufffd"
    assert cut.text == "ab\ufffd"


def test_bytes_that_are_no_character_do_not_hold_the_text_for_ever(tokenizer: Tokenizer) -> None:
    lead = tokenizer.encode("\u20ac")[0]
    stream = Detokenizer(tokenizer)
    assert stream.push([lead] * 10).count("\ufffd") >= 7
    assert stream.push(tokenizer.encode("x")).endswith("x")
    assert stream.text == tokenizer.decode([lead] * 10) + "x"


def test_byte_fallback_of_sentence_piece_vocabularies(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "\u2581": 1, "a": 2} | {f"<0x{byte:02X}>": byte + 3 for byte in range(256)}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.decoder = decoders.Sequence([  # type: ignore[assignment]
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    raw.save(str(tmp_path / "tokenizer.json"))
    found = Tokenizer.load(tmp_path)
    ids = [1, 2, *(byte + 3 for byte in "\u20ac".encode()), 1, 2]
    stream = Detokenizer(found)
    pieces = [stream.push([item]) for item in ids]
    assert "".join(pieces) + stream.finish() == found.decode(ids) == "a\u20ac a"
    assert pieces[2:5] == ["", "", "\u20ac"]


def test_chat_template_as_the_model_means_it(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert not tokenizer.render_chat([{"role": "user", "content": "hi"}], add_generation_prompt=False).endswith("nt\n")
    with pytest.raises(TemplateError, match="no role robot"):
        tokenizer.render_chat([{"role": "robot", "content": ""}])


def test_a_template_cannot_leave_the_sandbox(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}{{ messages.append(1) }}")
    with pytest.raises(TemplateError):
        Tokenizer.load(folder).render_chat([])


def test_templates_of_older_folders_and_folders_without(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TemplateError, match=r"data\.chat_template = false"):
        Tokenizer.load(folder).render_chat([])
    templates = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D{{ strftime_now('%Y') }}"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.load(folder).render_chat([]).startswith("D2")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_import_needs_neither_tokenizers_nor_jinja2() -> None:
    code = (
        "import sys; sys.modules['tokenizers'] = None; sys.modules['jinja2'] = None\n"
        "import paceline.tokenizer as t\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
        "try: t.require('tokenizers')\nexcept t.MissingExtra as e: print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'paceline[rollout]'" in done.stdout
