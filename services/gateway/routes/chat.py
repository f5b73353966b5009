"""POST /v1/chat/completions. Beside OpenAI's fields: return_token_ids, top_k, stop_token_ids, ignore_eos.

A model without a chat template gets a plain rendering: one line "Role: content" for each message, then "Assistant:".
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.tokenizer import TemplateError
from services.gateway.choices import Choice, Piece
from services.gateway.completion import MAX_TOP_LOGPROBS, SAMPLING_FIELDS, Plan, answer, plan, token_text
from services.gateway.edge import Edge
from services.gateway.fields import Fields, read_json
from services.gateway.problems import invalid

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
_FIELDS = (*SAMPLING_FIELDS, "messages", "max_tokens", "max_completion_tokens", "top_logprobs", "chat_template_kwargs")


def routes(edge: Edge) -> list[Route]:
    """The routes of this surface."""

    async def create(request: Request) -> Response:
        fields = Fields(await read_json(request), _FIELDS)
        edge.check_model(fields.get("model"))
        variables = fields.get("chat_template_kwargs") or {}
        if not isinstance(variables, dict):
            raise invalid("chat_template_kwargs", f"{variables!r} is not an object", "invalid_value")
        prompt_ids = edge.tokenizer.encode(render(edge, read_messages(fields.get("messages")), variables))
        limit_field = "max_completion_tokens" if fields.get("max_completion_tokens") is not None else "max_tokens"
        limit = fields.integer(limit_field, None, 1, 2**31 - 1)
        made = plan(edge, request, fields, prompt_ids, limit, _num_top(fields), ("messages", limit_field))

        def finished(made: Plan, choices: list[Choice]) -> dict[str, Any]:
            return _head(made, edge, "chat.completion") | {"choices": [_whole(edge, made, item) for item in choices]}

        def chunk(made: Plan, choice: Choice, piece: Piece, is_first: bool) -> dict[str, Any]:
            head = _head(made, edge, "chat.completion.chunk", with_prompt=is_first)
            return head | {"choices": [_delta(edge, made, choice, piece, is_first)]}

        return await answer(edge, request, made, finished, chunk)

    return [Route("/v1/chat/completions", create, methods=["POST"])]


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Messages with their content as one text. 400 names the message at fault."""
    if not isinstance(value, list) or not 1 <= len(value) <= MAX_MESSAGES:
        raise invalid("messages", f"not a list of 1 to {MAX_MESSAGES} messages", "invalid_value")
    return [_message(f"messages[{index}]", item) for index, item in enumerate(value)]


def _message(where: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, dict) or item.get("role") not in ROLES:
        raise invalid(where, f"needs a role among {', '.join(ROLES)}", "invalid_value")
    content = item.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise invalid(f"{where}.content", "only parts of type text are supported", "unsupported_content")
        content = "".join(part["text"] for part in content)
    if content is None and item.get("role") == "assistant":
        content = ""
    if not isinstance(content, str):
        raise invalid(f"{where}.content", f"{content!r} is neither a text nor a list of text parts", "invalid_value")
    role = "system" if item["role"] == "developer" else item["role"]
    return {**item, "role": role, "content": content}


def render(edge: Edge, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
    """The prompt text by the model's chat template, or the plain rendering of this module when it has none."""
    if not edge.tokenizer.has_chat_template:
        lines = [f"{message['role'].capitalize()}: {message['content']}\n" for message in messages]
        return "".join(lines) + "Assistant:"
    reserved = {"messages", "add_generation_prompt"} & set(variables)
    if reserved:
        raise invalid("chat_template_kwargs", f"{', '.join(sorted(reserved))} cannot be set", "invalid_value")
    try:
        return edge.tokenizer.render_chat(messages, add_generation_prompt=True, **variables)
    except TemplateError as error:
        raise invalid("messages", str(error), "invalid_value") from error


def _num_top(fields: Fields) -> int | None:
    top = fields.integer("top_logprobs", None, 0, MAX_TOP_LOGPROBS)
    if not fields.flag("logprobs"):
        if top:
            raise invalid("top_logprobs", "needs logprobs = true", "invalid_value")
        return None
    return top or 0


def _head(made: Plan, edge: Edge, kind: str, with_prompt: bool = True) -> dict[str, Any]:
    head: dict[str, Any] = {
        "id": f"chatcmpl-{made.id}", "object": kind, "created": made.created, "model": made.model,
        "system_fingerprint": edge.run_id,
    }  # fmt: skip
    if made.with_token_ids and with_prompt:
        head["prompt_token_ids"] = made.asked.prompt_ids
    return head


def _whole(edge: Edge, made: Plan, choice: Choice) -> dict[str, Any]:
    piece = Piece(choice.text, choice.token_ids, choice.logprobs, choice.top_token_ids, choice.top_logprobs)
    body: dict[str, Any] = {
        "index": choice.index, "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": _logprobs(edge, made, piece), "finish_reason": choice.finish_reason,
    }  # fmt: skip
    if made.with_token_ids:
        body |= {"token_ids": choice.token_ids, "version_spans": choice.spans}
    return body


def _delta(edge: Edge, made: Plan, choice: Choice, piece: Piece, is_first: bool) -> dict[str, Any]:
    delta = {"role": "assistant", "content": piece.text} if is_first else {"content": piece.text}
    body: dict[str, Any] = {
        "index": choice.index, "delta": delta, "logprobs": _logprobs(edge, made, piece),
        "finish_reason": piece.finish_reason,
    }  # fmt: skip
    if made.with_token_ids:
        body["token_ids"] = piece.token_ids
    return body


def _logprobs(edge: Edge, made: Plan, piece: Piece) -> dict[str, Any] | None:
    """One entry a token, alternatives most probable first."""
    if not made.with_logprobs:
        return None
    content = []
    for position, (token_id, logprob) in enumerate(zip(piece.token_ids, piece.logprobs, strict=True)):
        tops = []
        if piece.top_token_ids:
            pairs = zip(piece.top_token_ids[position], piece.top_logprobs[position], strict=True)
            tops = [_entry(edge, made, top_id, top_logprob) for top_id, top_logprob in pairs]
        content.append(_entry(edge, made, token_id, logprob) | {"top_logprobs": tops})
    return {"content": content, "refusal": None}


def _entry(edge: Edge, made: Plan, token_id: int, logprob: float) -> dict[str, Any]:
    text = edge.tokenizer.decode([token_id])
    return {"token": token_text(edge, made, token_id), "logprob": logprob, "bytes": list(text.encode())}
