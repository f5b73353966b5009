"""Weight updates of the embedded engine: full and adapter, in every mode, under gates, and what does not fit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import peft
import pytest
import torch
from engine_models import (
    LORA,
    Output,
    build_model,
    collect,
    engine,
    first_tokens,
    full_tensors,
    prompt,
    publish,
    teacher_forced,
    wants,
)
from transformers import LlamaForCausalLM

from paceline.rpc import errors
from paceline.weights.manifest import Manifest

LONG = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    """The weights of version 2: another random model of the same shape."""
    path = build_model(tmp_path_factory.mktemp("other"), seed=1)
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture
def version2(tmp_path: Path, other: LlamaForCausalLM) -> Path:
    return publish(tmp_path / "v2", full_tensors(other), 2)


async def start_long(backend, name: str = "long", samples: int = 2, **options):
    """A running request of LONG tokens a sample that has produced a few: (task, its outputs)."""
    outputs, enough = [Output() for _ in range(samples)], asyncio.Event()
    request = wants(name, prompt(20), range(samples), max_new_tokens=LONG, stream=True, **options)
    task = asyncio.create_task(first_tokens(backend, request, outputs, enough))
    await asyncio.wait_for(enough.wait(), 30)
    return task, outputs


@pytest.mark.parametrize("packed_from", [0, 1])
async def test_after_a_full_update_tokens_are_those_of_the_published_weights(folder, other, version2, packed_from: int):
    ids = prompt(25)
    async with engine(folder, packed_from=packed_from) as backend:
        applied = await backend.apply(version2, 2, "in_place")
        [found] = await collect(backend, wants("a", ids, [3], max_new_tokens=30))
    assert applied.digest == Manifest.read(version2).digest
    assert set(found.versions) == {2}
    expected = teacher_forced(other, ids, found.tokens)
    torch.testing.assert_close(torch.tensor(found.logprobs), expected, atol=1e-4, rtol=0)


async def test_in_place_goes_on_with_the_tokens_it_has_and_says_where_the_version_changed(folder, version2):
    async with engine(folder) as backend:
        task, outputs = await start_long(backend)
        await backend.apply(version2, 2, "in_place")
        await task
    for item in outputs:
        assert len(item.tokens) == LONG
        assert item.versions == sorted(item.versions)
        assert set(item.versions) == {1, 2}


async def test_retract_computes_what_was_there_again_with_the_weights_of_now(folder, other, version2):
    async with engine(folder) as backend:
        task, outputs = await start_long(backend, temperature=1.0)
        await backend.apply(version2, 2, "retract")
        await task
    for item in outputs:
        assert set(item.versions) == {1, 2}
        switch = item.versions.index(2)
        expected = teacher_forced(other, prompt(20), item.tokens)[switch:]
        torch.testing.assert_close(torch.tensor(item.logprobs[switch:]), expected, atol=1e-4, rtol=0)


async def test_in_place_keeps_the_keys_of_before(folder, other, version2):
    async with engine(folder) as backend:
        task, outputs = await start_long(backend)
        await backend.apply(version2, 2, "in_place")
        await task
    switch = outputs[0].versions.index(2)
    expected = teacher_forced(other, prompt(20), outputs[0].tokens)[switch:]
    assert (torch.tensor(outputs[0].logprobs[switch:]) - expected).abs().max() > 1e-3


async def test_abort_ends_running_requests_with_what_they_have_and_drain_lets_them_finish(
    folder, version2, tmp_path, other
):
    async with engine(folder) as backend:
        task, outputs = await start_long(backend, "aborted")
        await backend.apply(version2, 2, "abort")
        await task
        assert all(item.finish and item.finish.reason == "abort" and set(item.versions) == {1} for item in outputs)
        task, outputs = await start_long(backend, "drained")
        late = asyncio.create_task(collect(backend, wants("late", prompt(5), [1], max_new_tokens=2)))
        await backend.apply(publish(tmp_path / "v3", full_tensors(other), 3), 3, "drain")
        await task
        assert all(len(item.tokens) == LONG and set(item.versions) == {2} for item in outputs)
        [after] = await late
        assert set(after.versions) <= {2, 3}


async def test_an_update_waits_for_requests_that_ask_for_exactly_the_version_of_before(folder, version2):
    async with engine(folder) as backend:
        task, outputs = await start_long(backend, exact_version=1)
        await backend.apply(version2, 2, "in_place")
        await task
        assert all(len(item.tokens) == LONG and set(item.versions) == {1} for item in outputs)
        assert backend.weight_version == 2


async def test_a_waiting_request_whose_exact_version_was_left_is_aborted(folder, version2):
    async with engine(folder) as backend:
        await backend.pause("in_place", 60)
        waiting = asyncio.create_task(collect(backend, wants("a", prompt(5), [1], exact_version=1)))
        await asyncio.sleep(0)
        await backend.apply(version2, 2, "in_place")
        with pytest.raises(errors.Aborted, match="exact_version = 1"):
            await waiting


async def test_bfloat16_engine_takes_bfloat16_weights_and_reports_their_digest(folder, other, tmp_path):
    path = publish(tmp_path / "v2", full_tensors(other, torch.bfloat16), 2)
    async with engine(folder, dtype="bfloat16") as backend:
        applied = await backend.apply(path, 2, "in_place")
    assert applied.digest == Manifest.read(path).digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_adapters_are_served_as_peft_computes_them(folder, tmp_path, dtype: str):
    base = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model = peft.get_peft_model(base, peft.PeftConfig.from_peft_type(**LORA)).eval()
    ids = prompt(25)
    async with engine(folder, dtype=dtype, packed_from=1) as backend:
        [before] = await collect(backend, wants("before", ids, [3], max_new_tokens=20))
        for version in (2, 3):
            torch.manual_seed(version)
            state = {}
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.data = torch.randn_like(parameter, dtype=torch.float32) * 0.1
                    state[name.replace(".default", "")] = parameter.data
            path = publish(tmp_path / f"v{version}", state, version, "adapter", LORA)
            applied = await backend.apply(path, version, "in_place")
            assert applied.digest == Manifest.read(path).digest
            [found] = await collect(backend, wants(f"v{version}", ids, [3], max_new_tokens=20))
            expected = teacher_forced(model, ids, found.tokens)
            gap = (torch.tensor(found.logprobs) - expected).abs()
            assert gap.max() < 1e-4 if dtype == "float32" else gap.mean() < 0.1
            assert found.tokens != before.tokens
            assert set(found.versions) == {version}


async def test_rows_stay_bitwise_independent_with_an_adapter(folder, tmp_path):
    torch.manual_seed(0)
    base = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(base, peft.PeftConfig.from_peft_type(**LORA))
    state = {
        name.replace(".default", ""): torch.randn_like(parameter, dtype=torch.float32) * 0.1
        for name, parameter in model.named_parameters()
        if "lora_" in name
    }
    path = publish(tmp_path / "v2", state, 2, "adapter", LORA)
    requests = [wants(f"r{n}", prompt(5 + 7 * n, n), range(n, 2 * n + 1), max_new_tokens=25) for n in range(6)]
    for dtype in ("float32", "bfloat16"):
        async with engine(folder, dtype=dtype) as backend:
            await backend.apply(path, 2, "in_place")
            alone = [await collect(backend, request) for request in requests]
            together = await asyncio.gather(*(collect(backend, request) for request in requests))
        found, expected = ([[(o.tokens, o.logprobs) for o in item] for item in side] for side in (alone, together))
        assert found == expected


async def test_what_does_not_fit_is_refused_and_the_served_weights_stay(folder, other, tmp_path):
    ids = prompt(10)
    tensors = full_tensors(other)
    name = next(iter(tensors))
    broken = {
        "shape": {**tensors, name: tensors[name][:, :3].clone()},
        "unknown": {**tensors, "model.extra.weight": torch.zeros(2)},
        "lacks": {key: value for key, value in tensors.items() if key != name},
    }
    async with engine(folder) as backend:
        [before] = await collect(backend, wants("before", ids, [1], max_new_tokens=8))
        for number, (word, content) in enumerate(broken.items(), start=2):
            path = publish(tmp_path / word, content, number)
            with pytest.raises(errors.FailedPrecondition, match=f"weight version {number}"):
                await backend.apply(path, number, "in_place")
        [after] = await collect(backend, wants("after", ids, [1], max_new_tokens=8))
    assert (before.tokens, before.logprobs) == (after.tokens, after.logprobs)
    assert set(after.versions) == {1}


async def test_an_altered_byte_is_found_before_anything_is_served(folder, version2):
    file = version2 / "weights.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    async with engine(folder) as backend:
        with pytest.raises(errors.DataLoss, match="checksum"):
            await backend.apply(version2, 2, "in_place")
        assert backend.weight_version == 1
