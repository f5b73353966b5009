"""The OpenAI client, unmodified, against gateway, router and a scripted engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import openai
import pytest

from paceline.api.router.v1 import router_service_pb2_grpc as router_grpc
from paceline.ids import new_id
from paceline.rpc.client import open_channel
from paceline.rpc.http import HttpServer, bind
from paceline.rpc.status import StatusBoard
from paceline.testing.scripted_engine import ScriptedEngine, fixed, scripted_logprob
from paceline.tokenizer import Tokenizer
from services.gateway.edge import Edge
from services.gateway.web import application

MODEL = Path(__file__).parents[2] / "assets" / "sort4"
MAX_LEN = 64


@dataclass
class Gateway:
    """The gateway, what is behind it, and clients of it."""

    router: Any
    engine: ScriptedEngine
    tokenizer: Tokenizer
    url: str
    openai: openai.AsyncOpenAI
    http: httpx.AsyncClient

    def say(self, text: str, end: bool = True) -> list[int]:
        """The engine answers with this text from now on; returns its tokens."""
        tokens = self.tokenizer.encode(text) + ([0] if end else [])
        self.engine.script = fixed(tokens)
        return tokens


@asynccontextmanager
async def _serve(
    run_router: Callable[..., Any], timeout_seconds: float = 20.0, **options: Any
) -> AsyncIterator[Gateway]:
    async with run_router(**options) as router:
        channel: grpc.aio.Channel = open_channel(router.address)
        tokenizer = Tokenizer.load(MODEL)
        board = StatusBoard("gateway", "gateway-0", new_id(), "demo")
        stub = router_grpc.RouterServiceStub(channel)
        edge = Edge(stub, tokenizer, "demo", "policy", MAX_LEN, timeout_seconds, board)
        bound = bind("127.0.0.1:0", "gateway.listen")
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        server = asyncio.create_task(HttpServer(application(edge), bound, 2).run_until_cancelled())
        engine = ScriptedEngine("engine-0", weight_version=3)
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        try:
            async with httpx.AsyncClient(base_url=url) as http:
                yield Gateway(router, engine, tokenizer, url, client, http)
        finally:
            await client.close()
            server.cancel()
            await asyncio.gather(server, return_exceptions=True)
            await channel.close()


@pytest.fixture
async def gateway(run_router: Callable[..., Any]) -> AsyncIterator[Gateway]:
    """A gateway over one engine at version 3."""
    async with _serve(run_router) as served:
        await served.router.publish(3)
        await served.router.join(served.engine)
        await served.router.routable("engine-0")
        yield served


_HELLO: list[Any] = [{"role": "user", "content": "hello"}]


async def test_chat_answers_with_text_usage_and_version(gateway: Gateway) -> None:
    tokens = gateway.say("sorted: abc")
    raw = await gateway.openai.chat.completions.with_raw_response.create(
        model="policy", messages=_HELLO, n=2, max_tokens=20, seed=7
    )
    answer = raw.parse()
    assert [choice.message.content for choice in answer.choices] == ["sorted: abc"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2 * len(tokens)
    assert answer.usage.prompt_tokens == len(gateway.tokenizer.encode("User: hello\nAssistant:"))
    assert raw.headers["x-paceline-weight-version"] == "3"
    assert (answer.model_extra or {})["weight_version"] == 3


async def test_the_same_seed_asks_for_the_same_samples(gateway: Gateway) -> None:
    for _ in range(2):
        await gateway.openai.chat.completions.create(model="policy", messages=_HELLO, n=3, seed=7, max_tokens=2)
    first, second = gateway.engine.requests
    assert list(first.seeds) == list(second.seeds)
    assert len(set(first.seeds)) == 3


async def test_sampling_fields_reach_the_engine(gateway: Gateway) -> None:
    gateway.say("x")
    await gateway.openai.chat.completions.create(
        model="policy", messages=_HELLO, temperature=0.5, top_p=0.9, max_completion_tokens=5, stop=["END", "!"],
        extra_body={"top_k": 3}, extra_headers={"X-Session-ID": "s1"},
    )  # fmt: skip
    asked = gateway.engine.requests[0]
    assert (asked.sampling.temperature, asked.sampling.top_p, asked.sampling.top_k) == (0.5, 0.9, 3)
    assert asked.sampling.max_new_tokens == 5
    assert list(asked.sampling.stop) == ["END", "!"]
    assert asked.session_id == "s1"


async def test_token_ids_and_logprobs_are_those_of_the_engine(gateway: Gateway) -> None:
    tokens = gateway.say("ab")
    answer = await gateway.openai.chat.completions.create(
        model="policy", messages=_HELLO, logprobs=True, top_logprobs=2, max_tokens=9,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    body = answer.model_dump()
    assert body["choices"][0]["token_ids"] == tokens
    assert body["choices"][0]["version_spans"] == [[3, len(tokens)]]
    assert body["prompt_token_ids"] == gateway.tokenizer.encode("User: hello\nAssistant:")
    content = body["choices"][0]["logprobs"]["content"]
    assert [item["logprob"] for item in content] == [scripted_logprob(token) for token in tokens]
    assert [item["token"] for item in content] == ["a", "b", "\n"]
    assert all(len(item["top_logprobs"]) == 2 for item in content)


async def test_a_stream_is_the_same_answer_in_pieces(gateway: Gateway) -> None:
    tokens = gateway.say("one two")
    stream = await gateway.openai.chat.completions.create(
        model="policy", messages=_HELLO, stream=True, stream_options={"include_usage": True}, n=2, max_tokens=20,
        extra_body={"return_token_ids": True},
    )  # fmt: skip
    text, ids, reasons, usage = ["", ""], [[], []], {}, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text[choice.index] += choice.delta.content or ""
            ids[choice.index] += (choice.model_extra or {})["token_ids"]
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert text == ["one two"] * 2
    assert ids == [tokens, tokens]
    assert reasons == {0: "stop", 1: "stop"}
    assert usage is not None
    assert usage.completion_tokens == 2 * len(tokens)


async def test_events_end_with_done(gateway: Gateway) -> None:
    gateway.say("ab")
    body = {"model": "policy", "messages": _HELLO, "stream": True, "max_tokens": 5}
    answer = await gateway.http.post("/v1/chat/completions", json=body)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["x-paceline-weight-version"] == "3"
    assert events[-1] == "[DONE]"
    first = json.loads(events[0])
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_string_is_in_the_tokens_and_not_in_the_text(gateway: Gateway, stream: bool) -> None:
    gateway.say("abc<en<end>", end=False)
    options: Any = {"model": "policy", "messages": _HELLO, "stop": "<end>", "max_tokens": 20, "stream": stream}
    answer = await gateway.openai.chat.completions.create(**options)
    text = ""
    if stream:
        async for chunk in answer:
            text += chunk.choices[0].delta.content or ""
    else:
        text = answer.choices[0].message.content
    assert text == "abc<en"


async def test_the_token_limit_is_said(gateway: Gateway) -> None:
    gateway.say("abcdef", end=False)
    answer = await gateway.openai.chat.completions.create(model="policy", messages=_HELLO, max_tokens=3)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("abc", "length")


async def test_text_completion(gateway: Gateway) -> None:
    gateway.say("cde")
    answer = await gateway.openai.completions.create(model="policy", prompt="ab", max_tokens=9, logprobs=1)
    assert answer.choices[0].text == "cde"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["c", "d", "e", "\n"]
    by_ids = await gateway.openai.completions.create(model="policy", prompt=[2, 3], max_tokens=9, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in by_ids]) == "cde"
    prompts = [request.prompt_token_ids.data for request in gateway.engine.requests]
    assert prompts[0] == prompts[1]


async def test_token_in_token_out(gateway: Gateway) -> None:
    tokens = gateway.say("ab")
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 9, "logprobs": 1, "skip_special_tokens": False}}
    answer = (await gateway.http.post("/inference/v1/generate", json=body)).json()
    assert answer["choices"][0]["token_ids"] == tokens
    content = answer["choices"][0]["logprobs"]["content"]
    assert [item["token"] for item in content] == [f"token_id:{token}" for token in tokens]
    assert answer["prompt_token_ids"] == [5, 6]


async def test_models_and_health(gateway: Gateway) -> None:
    models = [model async for model in gateway.openai.models.list()]
    assert [model.id for model in models] == ["policy"]
    extra = models[0].model_extra or {}
    assert (extra["max_model_len"], extra["weight_version"]) == (MAX_LEN, 3)
    assert (await gateway.openai.models.retrieve("policy")).id == "policy"
    assert (await gateway.http.get("/healthz")).status_code == 200
    health = await gateway.http.get("/health")
    assert (health.status_code, health.json()["engines"]) == (200, {"engine-0": "serves 3"})


async def test_an_unknown_model_lists_the_known_ones(gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError, match="known: policy"):
        await gateway.openai.chat.completions.create(model="gpt-4", messages=_HELLO)
    with pytest.raises(openai.NotFoundError):
        await gateway.openai.models.retrieve("gpt-4")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"stop": 5}, "stop"),
        ({"seed": "x"}, "seed"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x" * 200}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"temprature": 1}, "temprature"),
        ({"model": None}, "model"),
        ({"stream_options": 3}, "stream_options"),
    ],
)
async def test_a_wrong_field_is_400_and_named(gateway: Gateway, change: dict[str, Any], param: str) -> None:
    body = {"model": "policy", "messages": _HELLO, **change}
    answer = await gateway.http.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error")
    assert error["message"].startswith(f"{param}: ")
    assert gateway.engine.requests == []


async def test_an_engines_invalid_argument_is_400(gateway: Gateway) -> None:
    gateway.engine.faults.refuse = "sampling.top_k = 3 is not supported by this engine"
    with pytest.raises(openai.BadRequestError, match="top_k = 3"):
        await gateway.openai.chat.completions.create(model="policy", messages=_HELLO)


async def test_bodies_are_bounded_and_must_be_json(gateway: Gateway) -> None:
    large = await gateway.http.post("/v1/chat/completions", content=b"x" * (9 * 2**20))
    assert large.status_code == 413
    for content in (b"{", b"[1]", b""):
        answer = await gateway.http.post("/v1/chat/completions", content=content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    missing = await gateway.http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


async def test_without_engines_a_request_ends_as_504_with_the_reason(run_router: Callable[..., Any]) -> None:
    async with _serve(run_router, timeout_seconds=0.3) as gateway:
        assert (await gateway.http.get("/health")).status_code == 503
        with pytest.raises(openai.APIStatusError, match="no engine has joined the run") as caught:
            await gateway.openai.chat.completions.create(model="policy", messages=_HELLO)
        assert caught.value.status_code == 504


async def test_a_full_router_is_429_with_retry_after(run_router: Callable[..., Any]) -> None:
    async with _serve(run_router, max_waiting=1) as gateway:
        waiting = asyncio.create_task(gateway.openai.chat.completions.create(model="policy", messages=_HELLO))
        async with asyncio.timeout(10):
            while not gateway.router.router.placement.num_waiting:
                await asyncio.wait([waiting], timeout=0.01)
        with pytest.raises(openai.RateLimitError) as caught:
            await gateway.openai.chat.completions.create(model="policy", messages=_HELLO)
        assert caught.value.response.headers["retry-after"] == "1"
        waiting.cancel()


async def test_engines_that_all_fail_are_503(run_router: Callable[..., Any]) -> None:
    async with _serve(run_router, max_retries=0) as gateway:
        await gateway.router.publish(3)
        await gateway.router.join(gateway.engine)
        gateway.engine.faults.garble = True
        with pytest.raises(openai.InternalServerError) as caught:
            await gateway.openai.chat.completions.create(model="policy", messages=_HELLO)
        assert caught.value.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_the_generation(gateway: Gateway, stream: bool) -> None:
    engine = gateway.engine
    engine.token_seconds = 0.02 if stream else 0.0
    if not stream:
        engine.tokens.clear()
    engine.script = fixed([5] * 60)
    body = {"model": "policy", "messages": _HELLO, "stream": stream, "max_tokens": 40}
    if stream:
        async with gateway.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            await anext(answer.aiter_lines())
    else:
        task = asyncio.create_task(gateway.http.post("/v1/chat/completions", json=body))
        await engine.wait(lambda: engine.num_running == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await engine.wait(lambda: engine.num_running == 0 and len(engine.cancelled) == 1, seconds=2.0)


async def test_an_error_in_the_middle_of_a_stream_reaches_the_client(run_router: Callable[..., Any]) -> None:
    async with _serve(run_router, timeout_seconds=0.6) as gateway:
        await gateway.router.publish(3)
        await gateway.router.join(gateway.engine)
        await gateway.router.routable("engine-0")
        gateway.engine.script = fixed([5] * 40)
        gateway.engine.token_seconds = 0.1
        stream = await gateway.openai.chat.completions.create(model="policy", messages=_HELLO, stream=True)
        with pytest.raises(openai.APIError, match="unfinished on engine-0"):
            async for _ in stream:
                pass
