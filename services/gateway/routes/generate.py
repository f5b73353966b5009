"""POST /inference/v1/generate: token ids in, token ids out, nothing tokenized on the way.

The shape is vLLM's; each token of the log-probabilities is written "token_id:<id>".
"""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.choices import Choice, Piece
from services.gateway.completion import MAX_TOP_LOGPROBS, SAMPLING_FIELDS, Plan, answer, plan
from services.gateway.edge import Edge
from services.gateway.fields import Fields, read_json
from services.gateway.problems import invalid
from services.gateway.routes.completions import check_ids

_OUTER = ("model", "token_ids", "sampling_params", "stream")
_SAMPLING = (*SAMPLING_FIELDS, "max_tokens", "prompt_logprobs", "skip_special_tokens", "detokenize")


def routes(edge: Edge) -> list[Route]:
    """The routes of this surface."""

    async def create(request: Request) -> Response:
        raw = await read_json(request)
        Fields(raw, _OUTER)
        sampling = raw.get("sampling_params") or {}
        if not isinstance(sampling, dict):
            raise invalid("sampling_params", f"{sampling!r} is not an object", "invalid_value")
        if raw.get("stream") or sampling.get("prompt_logprobs"):
            raise invalid("stream" if raw.get("stream") else "prompt_logprobs", "is not supported here",
                          "unsupported_parameter")  # fmt: skip
        fields = Fields({**sampling, "model": raw.get("model") or edge.model_name}, _SAMPLING)
        prompt_ids = check_ids(edge, "token_ids", raw.get("token_ids"))
        num_top = fields.integer("logprobs", None, 0, MAX_TOP_LOGPROBS)
        limit = fields.integer("max_tokens", None, 1, 2**31 - 1)
        # One log-probability a token is the token's own: no alternatives have to be computed.
        alternatives = None if num_top is None else num_top if num_top > 1 else 0
        made = plan(edge, request, fields, prompt_ids, limit, alternatives, ("token_ids", "max_tokens"))

        def finished(made: Plan, choices: list[Choice]) -> dict[str, Any]:
            return {
                "request_id": made.id, "created": made.created, "model": made.model,
                "choices": [_choice(made, choice) for choice in choices], "prompt_token_ids": prompt_ids,
            }  # fmt: skip

        def chunk(made: Plan, choice: Choice, piece: Piece, is_first: bool) -> dict[str, Any]:
            raise AssertionError("this surface does not stream")

        return await answer(edge, request, made, finished, chunk)

    return [Route("/inference/v1/generate", create, methods=["POST"])]


def _choice(made: Plan, choice: Choice) -> dict[str, Any]:
    logprobs = None
    if made.with_logprobs:
        content = []
        for position, (token_id, logprob) in enumerate(zip(choice.token_ids, choice.logprobs, strict=True)):
            tops: list[dict[str, Any]] = []
            if choice.top_token_ids:
                pairs = zip(choice.top_token_ids[position], choice.top_logprobs[position], strict=True)
                tops = [{"token": f"token_id:{top_id}", "logprob": value} for top_id, value in pairs]
            content.append({"token": f"token_id:{token_id}", "logprob": logprob, "top_logprobs": tops})
        logprobs = {"content": content}
    return {
        "index": choice.index, "token_ids": choice.token_ids, "finish_reason": choice.finish_reason,
        "logprobs": logprobs, "version_spans": choice.spans,
    }  # fmt: skip
