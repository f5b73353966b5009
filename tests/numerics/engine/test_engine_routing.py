"""The engine says which experts each token went through: those that transformers chooses."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from engine_models import build_model, engine, full_tensors, prompt, publish, wants

from paceline.config import ConfigError
from services.engine.backends.embedded import Embedded
from services.engine.generation import Request

sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_moe import LAYERS, TOP_K, routing_of, save_moe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_moe(tmp_path_factory.mktemp("moe"))


async def routed(
    backend: Embedded, request: Request, begun: asyncio.Event | None = None
) -> list[tuple[list[int], np.ndarray]]:
    """Tokens and routing of each sample; `begun` is set once there are some tokens."""
    tokens: list[list[int]] = [[] for _ in request.seeds]
    parts: list[list[np.ndarray]] = [[] for _ in request.seeds]
    async for pieces in backend.submit(request):
        for piece in pieces:
            tokens[piece.index] += piece.token_ids
            parts[piece.index] += [] if piece.routing is None else [piece.routing]
        if begun is not None and min(map(len, tokens)) > 5:
            begun.set()
    return [(ids, np.concatenate(rows)) for ids, rows in zip(tokens, parts, strict=True)]


def asked(name: str, length: int, seeds: range, **options) -> Request:
    request = replace(wants(name, prompt(length, length) % 50, seeds, **options), with_routing=True)
    return request


@pytest.mark.parametrize("stream", [False, True])
async def test_every_token_but_the_last_has_the_experts_of_transformers(folder: Path, stream: bool) -> None:
    async with engine(folder, record_routing=True) as backend:
        requests = [asked(f"r{n}", n, range(n, n + 9), max_new_tokens=17, stream=stream) for n in (1, 5, 33)]
        plain = wants("plain", prompt(4) % 50, range(3), max_new_tokens=5)
        *found, without = await asyncio.gather(
            *(routed(backend, item) for item in requests), collect_plain(backend, plain)
        )
    assert without == [None] * 3
    for request, samples in zip(requests, found, strict=True):
        for tokens, routing in samples:
            ids = np.array([*request.prompt, *tokens])
            assert routing.dtype == np.uint8
            assert routing.shape == (len(ids) - 1, LAYERS - 1, TOP_K)
            assert (routing == routing_of(folder, ids)).all()


async def collect_plain(backend: Embedded, request: Request) -> list[object]:
    return [piece.routing async for pieces in backend.submit(request) for piece in pieces if piece.finish]


async def test_what_was_read_before_keeps_its_routing_over_a_retracting_update(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    tensors = full_tensors(model)
    tensors = {name: -item if name.endswith("gate.weight") else item for name, item in tensors.items()}
    where = publish(tmp_path / "v2", tensors, 2)
    async with engine(folder, record_routing=True) as backend:
        request = asked("r", 6, range(4), max_new_tokens=200, stream=True)
        begun = asyncio.Event()
        running = asyncio.create_task(routed(backend, request, begun))
        await begun.wait()
        await backend.apply(where, 2, "retract")
        samples = await running
    for tokens, routing in samples:
        ids = np.array([*request.prompt, *tokens])
        assert len(routing) == len(ids) - 1
        assert (routing[:6] == routing_of(folder, ids)[:6]).all()
        assert (routing != routing_of(folder, ids)).any()


async def test_a_model_without_experts_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.record_routing = true: LlamaForCausalLM .* has no experts"):
        async with engine(build_model(tmp_path), record_routing=True):
            pass
