"""POST /v1/completions: text or token ids in, one prompt a request."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.choices import Choice, Piece
from services.gateway.completion import MAX_TOP_LOGPROBS, SAMPLING_FIELDS, Plan, answer, plan, token_text
from services.gateway.edge import Edge
from services.gateway.fields import Fields, read_json
from services.gateway.problems import invalid

DEFAULT_MAX_TOKENS = 16
_FIELDS = (*SAMPLING_FIELDS, "prompt", "max_tokens")


def routes(edge: Edge) -> list[Route]:
    """The routes of this surface."""

    async def create(request: Request) -> Response:
        fields = Fields(await read_json(request), _FIELDS)
        edge.check_model(fields.get("model"))
        prompt_ids = read_prompt(edge, fields.get("prompt"))
        limit = fields.integer("max_tokens", DEFAULT_MAX_TOKENS, 1, 2**31 - 1)
        num_top = fields.integer("logprobs", None, 0, MAX_TOP_LOGPROBS)
        made = plan(edge, request, fields, prompt_ids, limit, num_top, ("prompt", "max_tokens"))

        def finished(made: Plan, choices: list[Choice]) -> dict[str, Any]:
            items = []
            for choice in choices:
                piece = Piece(
                    choice.text, choice.token_ids, choice.logprobs, choice.top_token_ids, choice.top_logprobs,
                    choice.finish_reason,
                )  # fmt: skip
                items.append(_choice(edge, made, choice, piece))
                if made.with_token_ids:
                    items[-1]["version_spans"] = choice.spans
            return _head(made) | {"choices": items}

        def chunk(made: Plan, choice: Choice, piece: Piece, is_first: bool) -> dict[str, Any]:
            return _head(made, with_prompt=is_first) | {"choices": [_choice(edge, made, choice, piece)]}

        return await answer(edge, request, made, finished, chunk)

    return [Route("/v1/completions", create, methods=["POST"])]


def read_prompt(edge: Edge, value: Any) -> list[int]:
    """Token ids of a prompt: a text, a list of token ids, or a list of one of these."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return edge.tokenizer.encode(value)
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        raise invalid("prompt", f"{len(value)} prompts; send one a request", "unsupported_parameter")
    return check_ids(edge, "prompt", value)


def check_ids(edge: Edge, name: str, value: Any) -> list[int]:
    """A list of ids of the model's vocabulary."""
    if not isinstance(value, list) or not value:
        raise invalid(name, "neither a text nor a list of token ids", "invalid_value")
    size = edge.tokenizer.vocab_size
    for item in value:
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < size:
            raise invalid(name, f"{item!r} is not a token id from 0 to {size - 1}", "invalid_value")
    return value


def _head(made: Plan, with_prompt: bool = True) -> dict[str, Any]:
    head: dict[str, Any] = {
        "id": f"cmpl-{made.id}", "object": "text_completion", "created": made.created, "model": made.model,
    }  # fmt: skip
    if made.with_token_ids and with_prompt:
        head["prompt_token_ids"] = made.asked.prompt_ids
    return head


def _choice(edge: Edge, made: Plan, choice: Choice, piece: Piece) -> dict[str, Any]:
    body: dict[str, Any] = {
        "index": choice.index, "text": piece.text, "logprobs": _logprobs(edge, made, choice, piece),
        "finish_reason": piece.finish_reason,
    }  # fmt: skip
    if made.with_token_ids:
        body["token_ids"] = piece.token_ids
    return body


def _logprobs(edge: Edge, made: Plan, choice: Choice, piece: Piece) -> dict[str, Any] | None:
    if not made.with_logprobs:
        return None
    texts = [token_text(edge, made, token_id) for token_id in piece.token_ids]
    before = len(choice.token_ids) - len(piece.token_ids)
    offset = len(edge.tokenizer.decode(choice.token_ids[:before]))
    offsets = []
    for token_id in piece.token_ids:
        offsets.append(offset)
        offset += len(edge.tokenizer.decode([token_id]))
    tops = [
        {token_text(edge, made, token_id): logprob for token_id, logprob in zip(ids, values, strict=True)}
        for ids, values in zip(piece.top_token_ids, piece.top_logprobs, strict=True)
    ]
    return {"tokens": texts, "token_logprobs": piece.logprobs, "top_logprobs": tops or None, "text_offset": offsets}
