"""Text to token ids and back for every service that does not load the model: tokenizers and jinja2, no torch.

The packages are imported when a tokenizer is loaded, so that a service which only might need one starts without them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from paceline.config.errors import ConfigError

_REPLACEMENT = "\ufffd"
_MAX_HELD = 3
"""A character is at most four bytes long, so at most three bytes of one can be waiting for the rest."""
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class MissingExtra(ImportError):
    """A package of an optional extra is not installed; the text says what to install."""


class TemplateError(ValueError):
    """A chat template is missing, or refused the messages; the text is the template's own reason."""


def require(module: str, extra: str = "rollout") -> Any:
    """Import an optional module. MissingExtra names the package and the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingExtra(
            f"the package {package!r} is not installed in this environment; run: pip install 'paceline[{extra}]'"
        ) from error


class Tokenizer:
    """The tokenizer of one model folder."""

    def __init__(self, inner: Any, eos_token_ids: list[int], special: Mapping[str, str], chat_template: str) -> None:
        self._inner = inner
        self.eos_token_ids = eos_token_ids
        """Ids that end a sequence, most usual first; empty when the model names none."""
        self._special = dict(special)
        self._chat_template = chat_template
        self._render: Callable[..., str] | None = None
        added = inner.get_added_tokens_decoder()
        self.vocab_size: int = max(inner.get_vocab_size(), *(token_id + 1 for token_id in added), 0)
        """One more than the largest id."""

    @classmethod
    def load(cls, model_path: str | Path) -> Tokenizer:
        """Read a model folder: tokenizer.json and, where there, tokenizer_config.json, generation_config.json,
        config.json and chat_template.jinja. ConfigError names a file that is missing or cannot be read."""
        folder = Path(model_path)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"model.path: {path} is missing; a model folder needs the tokenizer as tokenizer.json")
        tokenizers = require("tokenizers")
        try:
            inner = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises nothing more special for a malformed file.
            raise ConfigError(f"model.path: {path} is not a tokenizer: {error}") from error
        inner.no_truncation()
        inner.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        special = _special_tokens(config)
        eos = _eos_token_ids(folder, inner, special)
        return cls(inner, eos, special, _chat_template(folder, config))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Nothing is added; special tokens that are written out in the text are recognized."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of token ids. Bytes that are not UTF-8 become U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        """The id of one token by its exact text, or None."""
        return self._inner.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can be used."""
        return bool(self._chat_template)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation by the model's chat template. Encode it with `encode`.

        `variables` reach the template (tools=..., enable_thinking=...). TemplateError when there is no template or it
        refuses the messages. The template runs in a sandbox: it can neither change what it is given nor reach Python.
        """
        if not self._chat_template:
            raise TemplateError(
                "this tokenizer has no chat template: neither chat_template.jinja nor a chat_template in "
                "tokenizer_config.json; send plain text, or set data.chat_template = false"
            )
        if self._render is None:
            self._render = _compile(self._chat_template)
        given = {"tools": None, "documents": None, **self._special, **variables}
        return self._render(messages=list(messages), add_generation_prompt=add_generation_prompt, **given)


class Detokenizer:
    """Text of a growing sequence, given out only up to the last whole character.

    Each push decodes a short window, because a token's text depends on its neighbours (leading spaces, split bytes).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = []
        self._context = 0
        """First id of the window: where the last piece began that ended on a character boundary."""
        self._done = 0
        """First id whose text has not been given out completely."""
        self._partial = 0
        """Characters of the ids from `_done` on that were given out already."""
        self.text = ""
        """Everything given out so far."""

    def push(self, ids: Sequence[int]) -> str:
        """Add sampled ids and return the new text; bytes of an unfinished character wait for the next push."""
        self._ids.extend(ids)
        new, held = self._pending(hold=True)
        self._partial += len(new)
        if not held:
            self._context, self._done, self._partial = self._done, len(self._ids), 0
        self.text += new
        return new

    def finish(self) -> str:
        """The text that was still held back; an unfinished character becomes U+FFFD."""
        new, _ = self._pending(hold=False)
        self._context, self._done, self._partial = self._done, len(self._ids), 0
        self.text += new
        return new

    def _pending(self, hold: bool) -> tuple[str, int]:
        before = self._tokenizer.decode(self._ids[self._context : self._done], self._skip_special)
        window = self._tokenizer.decode(self._ids[self._context :], self._skip_special)
        held = len(window) - len(window.rstrip(_REPLACEMENT))
        held = min(held, _MAX_HELD) if hold else 0
        return window[len(before) + self._partial : len(window) - held], held


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path: {path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model.path: {path} should hold a JSON object, not {type(found).__name__}")
    return found


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; each is written as text or as an object with `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _eos_token_ids(folder: Path, inner: Any, special: Mapping[str, str]) -> list[int]:
    """What generation_config.json says, else config.json; and always the tokenizer's own end-of-sequence token."""
    declared: Any = None
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(folder / name).get("eos_token_id")
        if declared is not None:
            break
    ids = declared if isinstance(declared, list) else [declared] if declared is not None else []
    ids = [int(item) for item in ids]
    own = inner.token_to_id(special["eos_token"]) if "eos_token" in special else None
    if own is not None and own not in ids:
        ids.append(own)
    return ids


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template") or ""
    if isinstance(template, list):
        by_name = {item["name"]: item["template"] for item in template}
        template = by_name.get("default") or next(iter(by_name.values()), "")
    return template


def _compile(template: str) -> Callable[..., str]:
    """A renderer of a chat template, with the filters and functions that templates in the field rely on."""
    jinja2 = require("jinja2")
    sandbox = require("jinja2.sandbox")
    extension = require("jinja2.ext").Extension

    class Generation(extension):
        """`{% generation %}` marks the assistant's own text for other tools; here it only passes its content on."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(f"chat template: {message}")

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
                sort_keys: bool = False) -> str:  # fmt: skip
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        compiled = environment.from_string(template)
    except jinja2.TemplateError as error:
        raise TemplateError(f"chat template does not parse: {error}") from error

    def render(**variables: Any) -> str:
        try:
            return compiled.render(**variables)
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template: {error}") from error

    return render
