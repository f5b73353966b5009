"""The embedded engine against transformers, and against itself in other company: not a bit may differ."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
import torch
from engine_models import build_model, collect, engine, prompt, teacher_forced, wants
from transformers import LlamaForCausalLM

from services.engine.embedded.attention import partial_attention, plain_partial_attention

SORT4 = Path(__file__).parents[2] / "assets" / "sort4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, 100])
async def test_greedy_tokens_equal_those_of_transformers_generate(folder, reference, length: int):
    ids = prompt(length)
    async with engine(folder) as backend:
        [found] = await collect(backend, wants("a", ids, [1], temperature=0.0, max_new_tokens=40))
    tensor = torch.tensor([ids.tolist()])
    expected = reference.generate(
        tensor, attention_mask=torch.ones_like(tensor), max_new_tokens=40, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    assert found.tokens == expected[0, length:].tolist()


@pytest.mark.parametrize(("temperature", "packed_from"), [(1.0, 0), (0.7, 0), (1.3, 0), (1.0, 1)])
async def test_sampler_logprobs_equal_a_teacher_forced_forward(folder, reference, temperature: float, packed_from: int):
    async with engine(folder, packed_from=packed_from) as backend:
        for length in (1, 40):
            ids = prompt(length, 3)
            request = wants(f"r{length}", ids, range(10), temperature=temperature, max_new_tokens=50)
            outputs = await collect(backend, request)
            assert len({tuple(item.tokens) for item in outputs}) == 10
            for item in outputs:
                expected = teacher_forced(reference, ids, item.tokens, temperature)
                torch.testing.assert_close(torch.tensor(item.logprobs), expected, atol=1e-4, rtol=0)


def company(count: int) -> list:
    """Requests of all kinds: lengths, group sizes, temperatures, cuts, some with equal prompts."""
    generator = random.Random(5)
    requests = []
    for number in range(count):
        options = {"temperature": generator.choice([1.0, 1.0, 0.6, 0.0]), "max_new_tokens": generator.randint(1, 45)}
        if number % 5 == 0:
            options |= {"top_k": 20, "top_p": 0.9}
        ids = prompt(generator.randint(1, 90), number % 11)
        requests.append(
            wants(f"r{number}", ids, [number * 100 + i for i in range(generator.randint(1, 12))], **options)
        )
    return requests


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["grouped", "packed", "sort4"])
async def test_tokens_and_logprobs_are_bitwise_the_same_alone_and_in_company(folder, dtype: str, model: str):
    where = SORT4 if model == "sort4" else folder
    requests = company(24)
    if model == "sort4":
        requests = [wants(r.request_id, r.prompt % 51, r.seeds, **vars_of(r)) for r in requests]
    async with engine(where, dtype=dtype, packed_from=int(model == "packed")) as backend:
        alone = [await collect(backend, request) for request in requests]
        arrivals = random.Random(1)

        async def later(request):
            for _ in range(arrivals.randint(0, 40)):
                await asyncio.sleep(0)
            return await collect(backend, request)

        together = await asyncio.gather(*map(later, requests))
    assert [bits(item) for item in alone] == [bits(item) for item in together]


def bits(outputs: list) -> list:
    return [(item.tokens, item.logprobs, item.finish.reason) for item in outputs]


def vars_of(request) -> dict:
    sampling = request.sampling
    return {name: getattr(sampling, name) for name in ("temperature", "max_new_tokens", "top_k", "top_p")}


async def test_a_sample_does_not_depend_on_capacity_or_on_which_seeds_come_with_it(folder):
    ids = prompt(30)
    async with engine(folder, max_sequences=32) as backend:
        wide = await collect(backend, wants("a", ids, range(12), max_new_tokens=20))
    async with engine(folder, max_sequences=3) as backend:
        narrow = await collect(backend, wants("a", ids, range(12), max_new_tokens=20))
        [seventh] = await collect(backend, wants("b", ids, [7], max_new_tokens=20))
    assert [item.tokens for item in wide] == [item.tokens for item in narrow]
    assert [item.logprobs for item in wide] == [item.logprobs for item in narrow]
    assert (seventh.tokens, seventh.logprobs) == (wide[7].tokens, wide[7].logprobs)


async def test_noise_goes_with_the_absolute_position_so_a_sample_can_be_continued(folder, reference):
    ids = prompt(20)
    async with engine(folder) as backend:
        [whole] = await collect(backend, wants("a", ids, [4], max_new_tokens=30))
        longer = torch.cat([torch.tensor(ids), torch.tensor(whole.tokens[:13], dtype=torch.int32)]).numpy()
        [rest] = await collect(backend, wants("b", longer, [4], max_new_tokens=17))
    assert whole.tokens[13:] == rest.tokens


async def test_prompt_tokens_that_siblings_share_are_reported_as_cached(folder):
    async with engine(folder) as backend:
        outputs = await collect(backend, wants("a", prompt(20), range(10), max_new_tokens=2))
    assert [item.finish.num_cached_tokens for item in outputs if item.finish] == [0] + [20] * 9


async def test_top_logprobs_are_those_of_the_full_distribution(folder, reference):
    ids = prompt(9)
    async with engine(folder) as backend:
        pieces = []
        async for batch in backend.submit(wants("a", ids, [1], max_new_tokens=4, num_top_logprobs=3)):
            pieces += batch
    tokens = [token for piece in pieces for token in piece.token_ids]
    top = [row for piece in pieces for row in piece.top_logprobs]
    with torch.inference_mode():
        logits = reference(torch.tensor([[*ids.tolist(), *tokens]])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).topk(3).values
    torch.testing.assert_close(torch.tensor(top), expected, atol=1e-4, rtol=0)


def test_attention_by_matrix_products_equals_the_cpu_kernel():
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 2, length, 16) for length in (8, 64, 64))
    lengths = torch.tensor([1, 40, 64])
    mask = torch.where(torch.arange(64) < lengths[:, None], 0.0, float("-inf"))[:, None, None]
    for found, expected in zip(
        plain_partial_attention(query, key, value, mask, 0.25),
        partial_attention(query, key, value, mask, 0.25),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
