"""Routing replay: recorded experts, present weights; to the bit where nothing has changed, with the right gradient."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_moe import EXPERTS, TOP_K, routers, routing_of, save_moe
from tiny_policies import make_groups, save_model

from paceline.config import ConfigError
from paceline.config.trainer import TrainerConfig
from services.trainer.backends.torch import TorchBackend
from services.trainer.datum import Datum, InvalidDatum
from services.trainer.model.routing import scores_of
from services.trainer.objective import Objective

PLAIN: dict[str, Any] = {"loss": {"name": "policy_gradient", "importance_ratio": False}, "tokens_per_micro_batch": 90}
CHECKPOINTED = {"parallel": {"activation_checkpointing": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_moe(tmp_path_factory.mktemp("moe"))


def backend(folder: Path, replay: bool = True, **options: Any) -> TorchBackend:
    own = {name: options.pop(name) for name in ("share_prefix", "dtype") if name in options}
    return TorchBackend(folder, TrainerConfig(**PLAIN, routing_replay=replay, **options), 0, **own)


def groups_of(folder: Path | None = None, routing: bool = True) -> list[list[Datum]]:
    """Short groups with long common prompts, and one of a single datum, with their own routing in `folder`."""
    groups = make_groups([[5, 9, 3], [7, 7], [12]], [40, 12, 3])
    for datum in (item for group in groups for item in group):
        datum.routing = routing_of(folder, datum.token_ids) if folder is not None and routing else None
    return groups


def trained(policy: TorchBackend, groups: list[list[Datum]]) -> tuple[list[np.ndarray], dict[str, np.ndarray], dict]:
    """Log-probabilities, weights after an update with the gradients before, and metrics."""
    result = policy.forward_backward(groups, Objective.from_config(TrainerConfig(**PLAIN)))
    gradients = {f"{name} gradient": copied(item.grad) for name, item in policy.policy.trainable.items()}
    policy.optim_step(10.0, 0.1)
    weights = {name: copied(item) for name, item in policy.masters.tensors.items()}
    return [item for group in result.policy_logprobs for item in group], weights | gradients, result.metrics


def copied(tensor: torch.Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.detach().numpy().copy()


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return all((a == b).all() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("options", [{}, CHECKPOINTED, {"share_prefix": False}], ids=["shared", "checkpointed", "rows"])
def test_own_routing_replayed_is_the_plain_pass_to_the_bit(folder: Path, options: dict[str, Any]) -> None:
    groups = groups_of(folder)
    logprobs, weights, metrics = trained(backend(folder, **options), groups)
    plain_logprobs, plain_weights, _ = trained(backend(folder, replay=False, **options), groups_of())
    assert equal(logprobs, plain_logprobs)
    assert weights.keys() == plain_weights.keys()
    assert all((weights[name] == plain_weights[name]).all() for name in weights)
    assert metrics["routing_choices"] > 0 and metrics["routing_differing"] == 0


def other_routing(groups: list[list[Datum]], shared: bool = True) -> list[list[Datum]]:
    """Random experts; siblings have the same for what they share, unless they are not to."""
    for number, group in enumerate(groups):
        for sibling, datum in enumerate(group):
            random = np.random.default_rng([number, 0 if shared else sibling])
            scores = random.random((len(datum.token_ids) - 1, 2, EXPERTS))
            datum.routing = scores.argsort(-1)[..., :TOP_K].astype(np.uint8)
    return groups


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("options", [{}, CHECKPOINTED], ids=["kept", "checkpointed"])
def test_rows_and_checkpoints_change_nothing(folder: Path, options: dict[str, Any], shared: bool) -> None:
    groups = other_routing(groups_of(), shared)
    found = trained(backend(folder, dtype="float64", **options), groups)
    alone = trained(backend(folder, dtype="float64", share_prefix=False), [[d] for group in groups for d in group])
    for one, other in zip(found[0], alone[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    gradients = [name for name in found[1] if name.endswith(" gradient")]
    assert gradients
    for name in gradients:
        np.testing.assert_allclose(found[1][name], alone[1][name], rtol=1e-4, atol=2e-5, err_msg=name)
    ratio = [item[2]["routing_differing"] / item[2]["routing_choices"] for item in (found, alone)]
    assert ratio[0] > 0.3
    plain = trained(backend(folder, replay=False, dtype="float64"), groups_of())
    assert not all(np.allclose(a, b, atol=1e-3) for a, b in zip(found[0], plain[0], strict=True))


def written_out(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Weights of the chosen experts, from the formula."""
    exponentials = logits.exp()
    shares = exponentials / exponentials.sum(-1, keepdim=True)
    picked = torch.stack([shares[token, chosen[token]] for token in range(len(chosen))])
    return picked / picked.sum(-1, keepdim=True)


def test_gradient_goes_through_the_routers_weights(folder: Path) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 5, dtype=torch.float64), torch.randn(EXPERTS, 5, dtype=torch.float64)
    chosen = torch.rand(7, EXPERTS).argsort(-1)[:, :TOP_K]
    incoming = torch.randn(7, TOP_K, dtype=torch.float64)
    gradients = []
    for rule in (lambda logits: scores_of(logits, chosen, True), lambda logits: written_out(logits, chosen)):
        leaf = weight.clone().requires_grad_()
        (rule(hidden @ leaf.T) * incoming).sum().backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert gradients[0].abs().max() > 0.01
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-10, atol=1e-12)


def test_gradient_of_a_whole_model_is_that_of_one_written_out(folder: Path) -> None:
    [group] = other_routing(make_groups([[9]], [4]))
    policy = backend(folder, dtype="float64")
    policy.forward_backward([group], Objective.from_config(TrainerConfig(**PLAIN)))
    found = {name: item.grad for name, item in policy.policy.model.named_parameters() if "gate.weight" in name}

    [datum] = group
    assert datum.routing is not None
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    free = routing_of(folder, datum.token_ids, torch.float64)
    for place, router in enumerate(routers(model)):
        # The last token predicts nothing, so any experts will do.
        rows = np.concatenate([datum.routing[:, place], free[-1:, place]]).astype(np.int64)
        router.forward = told(router, torch.from_numpy(rows))
    logits = model(torch.tensor(datum.token_ids[None].astype(np.int64))).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(datum.token_ids[1:, None].astype(np.int64)))[:, 0]
    (-torch.tensor(datum.weights[1:] * datum.advantages[1:]).double() * logprobs).sum().backward()
    wanted = {name: item.grad for name, item in model.named_parameters() if "gate.weight" in name}
    assert len(wanted) == 2
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 1e-3
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-7)


def told(router: Any, chosen: torch.Tensor) -> Any:
    def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = hidden @ router.weight.T
        return logits, written_out(logits, chosen), chosen

    return forward


def test_replay_brings_sampler_and_policy_together_where_their_routers_differ(tmp_path: Path) -> None:
    """The trainer's routers see each three experts a little otherwise than the engine's, as other kernels do."""
    from services.engine.backends.embedded import Embedded
    from services.engine.generation import Request, Sampling

    folder = save_moe(tmp_path / "moe", alike=4e-6)
    prompt = np.arange(5, 12, dtype=np.int32)

    async def sample() -> list[tuple[list[int], list[float], np.ndarray]]:
        from paceline.config.services import EngineConfig

        config = EngineConfig(max_sequences=8, max_sequence_length=128, record_routing=True)
        engine = Embedded(Embedded.Options(), config, str(folder))
        await engine.load()
        engine.serve_base_weights()
        request = Request("r", prompt, tuple(range(8)), Sampling(max_new_tokens=30, ignore_eos=True), with_routing=True)
        pieces = [piece async for part in engine.submit(request) for piece in part]
        await engine.close()
        found = []
        for piece in sorted(pieces, key=lambda item: item.index):
            assert piece.routing is not None
            found.append((piece.token_ids, piece.logprobs, piece.routing))
        return found

    group = []
    for number, (tokens, logprobs, routing) in enumerate(asyncio.run(sample())):
        ids = np.array([*prompt, *tokens], np.int32)
        mask = np.array([0] * len(prompt) + [1] * len(tokens), np.float32)
        sampler = np.array([0.0] * len(prompt) + logprobs, np.float32)
        group.append(Datum(ids, mask, mask, sampler, name=f"sample {number}", routing=routing))

    def gap(replay: bool) -> float:
        policy = backend(folder, replay)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for router in routers(policy.policy.model):
                router.weight += 1e-6 * torch.randn(router.weight.shape, generator=generator)
        data = group if replay else [dataclasses.replace(item, routing=None) for item in group]
        [logprobs] = policy.forward([data])
        return max(
            float(np.abs(values - item.sampler_logprobs)[item.weights > 0].max())
            for values, item in zip(logprobs, group, strict=True)
        )

    assert gap(replay=True) < 1e-4
    assert gap(replay=False) > 1e-2


def test_missing_or_unfitting_routing_is_refused_by_the_name_of_the_sample(folder: Path) -> None:
    policy = backend(folder)
    [[datum]] = other_routing(make_groups([[4]], [3]))
    assert datum.routing is not None
    outside = np.where(datum.routing == datum.routing.max(), EXPERTS, datum.routing).astype(np.uint8)
    wrong = {
        "no routing was recorded": None,
        r"routing has shape \[7, 2, 2\], not \[6, 2, 2\]": np.concatenate([datum.routing, datum.routing[:1]]),
        "routing holds expert 6; the model has 6": outside,
        "one expert twice": np.zeros_like(datum.routing),
        "routing is of float32": datum.routing.astype(np.float32),
    }  # fmt: skip
    for message, routing in wrong.items():
        with pytest.raises(InvalidDatum, match=f"0/0: .*{message}"):
            policy.forward([[dataclasses.replace(datum, routing=routing)]])


def test_models_without_experts_and_backends_without_replay_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM .* has no experts"):
        backend(save_model(tmp_path / "llama", tied=False))
    with pytest.raises(ValueError, match="backend = 'megatron' cannot replay routing"):
        TrainerConfig(routing_replay=True, backend="megatron")


def test_the_reference_chooses_for_itself(folder: Path) -> None:
    policy = backend(folder, kl_coefficient=0.1)
    groups = other_routing(groups_of())
    plain = backend(folder, replay=False).forward(groups_of())
    assert equal(policy.forward(groups, reference=True)[0], plain[0])
    assert not equal(policy.forward(groups)[0], plain[0])
    adapter = backend(folder, kl_coefficient=0.1, lora={"rank": 2})
    assert equal(adapter.forward(groups, reference=True)[0], plain[0])
