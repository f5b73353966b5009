"""The four primitives over real gRPC: idempotent, checked at the boundary, and closed while the loop owns the slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
import safetensors.numpy

from paceline import arrays
from paceline.api.trainer.v1 import trainer_service_pb2 as pb
from paceline.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from paceline.config.trainer import TrainerConfig
from paceline.rpc.client import open_channel
from paceline.rpc.server import RpcServer
from paceline.rpc.status import StatusBoard
from services.trainer.backends.torch import TorchBackend
from services.trainer.checkpoint import CheckpointStore
from services.trainer.server import TrainerServer
from services.trainer.slot import Slot
from services.trainer.worker import Worker

MODEL = Path(__file__).parents[2] / "assets" / "sort4"
CALL = {"timeout": 30.0}


@dataclass
class Service:
    """A trainer service without a training loop."""

    stub: Any
    slot: Slot
    backend: TorchBackend
    server: TrainerServer
    directory: Path

    async def refused(self, call: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        return caught.value.code(), caught.value.details() or ""


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    backend = TorchBackend(MODEL, TrainerConfig(), 0)
    worker, slot = Worker(), Slot()
    server = TrainerServer(
        worker, slot, CheckpointStore(tmp_path / "checkpoints", 2), tmp_path / "exports", lambda _: 1e-3
    )
    server.backend = backend
    rpc = RpcServer(StatusBoard("trainer", "trainer-0", "i", "run"))
    pb_grpc.add_TrainerServiceServicer_to_server(server, rpc.server)
    address = rpc.bind("127.0.0.1:0")
    await rpc.start()
    channel = open_channel(address)
    yield Service(pb_grpc.TrainerServiceStub(channel), slot, backend, server, tmp_path)
    await channel.close()
    await rpc.stop(0)
    await worker.close()


def datum(ids: list[int], **inputs: list[float]) -> pb.Datum:
    message = pb.Datum(token_ids=arrays.to_wire(np.array(ids, np.int32)), temperature=1.0)
    for name, values in inputs.items():
        message.loss_inputs[name].CopyFrom(arrays.to_wire(np.array(values, np.float32)))
    return message


DATA = [datum([3, 4, 5, 6], weights=[0, 0, 1, 1]), datum([3, 4, 9], weights=[0, 0, 1])]


def backward(request_id: str, **fields: Any) -> pb.ForwardBackwardRequest:
    return pb.ForwardBackwardRequest(request_id=request_id, **{"data": DATA, "loss": "cross_entropy", **fields})


async def test_supervised_steps_lower_the_loss(service: Service) -> None:
    losses = []
    for number in range(5):
        response = await service.stub.ForwardBackward(backward(f"b{number}"), **CALL)
        losses.append(response.loss_sum)
        step = await service.stub.OptimStep(pb.OptimStepRequest(request_id=f"s{number}", denominator=3.0), **CALL)
        assert (step.stepped, step.step, step.learning_rate) == (True, number + 1, pytest.approx(1e-3))
    assert losses == sorted(losses, reverse=True)
    forward = await service.stub.Forward(pb.ForwardRequest(data=DATA), **CALL)
    logprobs = [arrays.from_wire(item, "policy_logprobs") for item in forward.policy_logprobs]
    assert [len(item) for item in logprobs] == [4, 3] and logprobs[0][0] == 0
    assert -(logprobs[0][2:].sum() + logprobs[1][2]) < losses[-1]


async def test_a_repeated_request_changes_nothing(service: Service) -> None:
    once = await service.stub.ForwardBackward(backward("same"), **CALL)
    answers = await asyncio.gather(*(service.stub.ForwardBackward(backward("same"), **CALL) for _ in range(3)))
    assert all(answer == once for answer in answers)
    request = pb.OptimStepRequest(request_id="step", denominator=3.0)
    assert await service.stub.OptimStep(request, **CALL) == await service.stub.OptimStep(request, **CALL)
    assert service.backend.updates == 1
    empty = await service.stub.OptimStep(pb.OptimStepRequest(request_id="empty", denominator=1.0), **CALL)
    assert not empty.stepped and empty.step == 1


async def test_ppo_over_the_wire(service: Service) -> None:
    scored = datum([3, 4, 5], weights=[0, 1, 1], advantages=[0, 2, 2], sampler_logprobs=[0, -1, -1])
    response = await service.stub.ForwardBackward(
        backward("p", data=[scored], loss="ppo", loss_parameters={"clip_low": 0.5, "clip_high": 0.5}), **CALL
    )
    logprobs = arrays.from_wire(response.policy_logprobs[0], "policy_logprobs")
    ratios = np.exp(logprobs[1:].astype(np.float64) + 1)
    expected = -np.minimum(ratios * 2, np.clip(ratios, 0.5, 1.5) * 2).sum()
    assert response.loss_sum == pytest.approx(expected, rel=1e-5)
    assert response.metrics["num_tokens:sum"] == 2


async def test_bounds_over_the_wire_may_be_ratios_themselves(service: Service) -> None:
    scored = datum([3, 4, 5], weights=[0, 1, 1], advantages=[0, 2, -2], sampler_logprobs=[0, -8, -1])
    response = await service.stub.ForwardBackward(
        backward("c", data=[scored], loss="ppo", loss_parameters={"ratio_low": 0.8, "ratio_high": 1.2}), **CALL
    )
    logprobs = arrays.from_wire(response.policy_logprobs[0], "policy_logprobs")
    ratios = np.exp(logprobs[1:].astype(np.float64) + np.array([8, 1]))
    factor = np.array([2, -2])
    expected = -np.minimum(ratios * factor, np.clip(ratios, 0.8, 1.2) * factor).sum()
    assert response.loss_sum == pytest.approx(expected, rel=1e-5)


async def test_preferences_over_the_wire_are_one_group(service: Service) -> None:
    pair = [
        datum([3, 4, last], weights=[0, 0, 1], advantages=[0, 0, sign], reference_logprobs=[0, 0, -1])
        for last, sign in ((5, 1), (6, -1))
    ]
    response = await service.stub.ForwardBackward(
        backward("d", data=pair, loss="dpo", loss_parameters={"beta": 0.5}), **CALL
    )
    chosen, rejected = (arrays.from_wire(item, "policy_logprobs")[2] for item in response.policy_logprobs)
    assert response.loss_sum == pytest.approx(2 * np.log1p(np.exp(-0.5 * (chosen - rejected))), rel=1e-5)


def weights(service: Service) -> dict[str, bytes]:
    return {name: item.numpy().tobytes() for name, item in service.backend.weights().items()}


async def test_checkpoint_export_and_load(service: Service) -> None:
    before = weights(service)
    saved = await service.stub.SaveCheckpoint(pb.SaveCheckpointRequest(request_id="a", name="mine"), **CALL)
    assert Path(saved.uri).name == "mine" and len(saved.digest) == 64
    await service.stub.ForwardBackward(backward("b"), **CALL)
    await service.stub.OptimStep(pb.OptimStepRequest(request_id="c", denominator=1.0), **CALL)
    assert weights(service) != before
    loaded = await service.stub.LoadCheckpoint(pb.LoadCheckpointRequest(request_id="d", name="mine"), **CALL)
    assert loaded.step == 0 and weights(service) == before
    exported = await service.stub.ExportModel(pb.ExportModelRequest(request_id="e", name="out"), **CALL)
    assert safetensors.numpy.load_file(Path(exported.uri) / "model.safetensors")
    code, text = await service.refused(
        service.stub.LoadCheckpoint(pb.LoadCheckpointRequest(request_id="f", name="theirs"), **CALL)
    )
    assert code == grpc.StatusCode.NOT_FOUND and "mine" in text


async def test_the_loop_owns_the_slot_but_forward_is_free(service: Service) -> None:
    service.slot.owner = "the run's training loop"
    for call in (
        service.stub.ForwardBackward(backward("x"), **CALL),
        service.stub.OptimStep(pb.OptimStepRequest(request_id="y", denominator=1.0), **CALL),
        service.stub.SaveCheckpoint(pb.SaveCheckpointRequest(request_id="z", name="n"), **CALL),
        service.stub.PublishWeights(pb.PublishWeightsRequest(request_id="w"), **CALL),
    ):
        code, text = await service.refused(call)
        assert code == grpc.StatusCode.FAILED_PRECONDITION and "training loop" in text
    await service.stub.Forward(pb.ForwardRequest(data=DATA), **CALL)
    service.server.backend = None
    code, _ = await service.refused(service.stub.Forward(pb.ForwardRequest(data=DATA), timeout=5.0))
    assert code == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (backward("1", loss="pppo"), "ppo"),
        (backward("2", loss="services.trainer.losses.ppo:Ppo"), "built-in"),
        (backward("3", loss="ppo", loss_parameters={"clip": 0.2}), "clip"),
        (backward("4", data=[datum([3, 4], weights=[0, 1, 1])]), "data[0].loss_inputs['weights']"),
        (backward("5", data=[DATA[0], datum([3, 4], weights=[0, float("nan")])]), "data[1]: weights"),
        (backward("6", data=[datum([3, 4], weights=[1, 1])]), "weights[0]"),
        (backward("7", data=[datum([3, 400], weights=[0, 1])]), "token id 400"),
        (backward("8", data=[datum([3, 4], weigths=[0, 1])]), "weigths"),
        (backward("9", data=[]), "empty"),
        (backward("10", loss="dpo"), "loss 'dpo' needs 'reference_logprobs'"),
        (backward("", loss="ppo"), "request_id"),
    ],
)
async def test_wrong_requests_are_named(service: Service, request_: pb.ForwardBackwardRequest, words: str) -> None:
    code, text = await service.refused(service.stub.ForwardBackward(request_, **CALL))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and words in text
    assert not service.backend.masters.pending


async def test_names_that_are_paths_and_unknown_slots_are_refused(service: Service) -> None:
    for name in ("../x", "step-000001", "latest", ""):
        code, _ = await service.refused(
            service.stub.SaveCheckpoint(pb.SaveCheckpointRequest(request_id=f"n{name}", name=name), **CALL)
        )
        assert code == grpc.StatusCode.INVALID_ARGUMENT
    code, text = await service.refused(service.stub.Forward(pb.ForwardRequest(slot="other", data=DATA), **CALL))
    assert code == grpc.StatusCode.NOT_FOUND and "policy" in text
