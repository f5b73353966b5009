"""The torch backend's entropy bonus and its teachers, against gradients of plain transformers in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError
from tiny_policies import VOCABULARY, make_groups
from torch import Tensor

from paceline.config import ConfigError
from paceline.config.trainer import TrainerConfig
from services.trainer.backends.torch import TorchBackend
from services.trainer.datum import Datum, InvalidDatum
from services.trainer.objective import Objective
from services.trainer.penalties.distillation import topk_divergence

LENGTHS, PROMPTS = [[3, 1, 5], [2, 4]], [6, 4]
TEMPERATURE = 0.8
K = 5
TermOf = Callable[[Datum, Tensor], Tensor]
"""From a datum and the policy's log-probabilities [num_tokens - 1, V] to terms [num_tokens - 1]."""


def load(path: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()


def all_logprobs(model: transformers.PreTrainedModel, datum: Datum) -> Tensor:
    ids = torch.from_numpy(datum.token_ids.astype(np.int64)).unsqueeze(0)
    return (model(input_ids=ids).logits[0, :-1] / datum.temperature).log_softmax(-1)


def reference_gradients(path: Path, groups: list[list[Datum]], term: TermOf) -> dict[str, Tensor]:
    model = load(path)
    total = torch.zeros((), dtype=torch.float64)
    for datum in (item for group in groups for item in group):
        total = total + (term(datum, all_logprobs(model, datum)) * torch.from_numpy(datum.weights[1:])).sum()
    total.backward()
    return {name: item.grad for name, item in model.named_parameters() if item.grad is not None}


def without_advantages(groups: list[list[Datum]]) -> list[list[Datum]]:
    for datum in (item for group in groups for item in group):
        datum.advantages = np.zeros_like(datum.advantages)
    return groups


def assert_gradients(path: Path, groups: list[list[Datum]], term: TermOf, **fields: object) -> dict[str, float]:
    config = TrainerConfig.model_validate({"tokens_per_micro_batch": 40, **fields})
    backend = TorchBackend(path, config, 0, dtype="float64")
    outcome = backend.forward_backward(groups, Objective.from_config(config))
    expected = reference_gradients(path, groups, term)
    found = {name: item.grad for name, item in backend.masters.tensors.items() if item.grad is not None}
    assert found.keys() == expected.keys()
    # The attention of short rows has its softmax in float32 whatever the type of the model.
    difference = torch.stack([(found[name] - gradient).norm() for name, gradient in expected.items()]).norm()
    assert difference < 1e-5 * torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    return outcome.metrics


def test_entropy_bonus(tiny_model: Path) -> None:
    groups = without_advantages(make_groups(LENGTHS, PROMPTS, temperature=TEMPERATURE))
    metrics = assert_gradients(
        tiny_model, groups, lambda datum, policy: 0.3 * (policy.exp() * policy).sum(-1), entropy_coefficient=0.3
    )
    assert metrics["entropy_sum"] > 0


@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_topk_divergence_to_a_teacher(tiny_model: Path, tied_model: Path, direction: str) -> None:
    groups = without_advantages(make_groups(LENGTHS, PROMPTS, temperature=TEMPERATURE))
    teacher = load(tied_model)

    def term(datum: Datum, policy: Tensor) -> Tensor:
        with torch.no_grad():
            taught = all_logprobs(teacher, datum).topk(K, dim=-1)
        return 0.7 * topk_divergence(policy.gather(1, taught.indices), taught.values, direction)  # type: ignore[arg-type]

    metrics = assert_gradients(
        tiny_model, groups, term, teachers={"default": {"path": str(tied_model)}},
        distillation={"mode": "topk", "k": K, "coefficient": 0.7, "direction": direction},
    )  # fmt: skip
    assert metrics["distillation_kl"] > 0


def test_topk_that_an_engine_gave_is_the_same_as_a_teacher_of_the_backend(tiny_model: Path, tied_model: Path) -> None:
    groups = without_advantages(make_groups(LENGTHS, PROMPTS))
    config = TrainerConfig.model_validate({
        "distillation": {"mode": "topk", "k": K}, "teachers": {"default": {"path": str(tied_model)}},
    })  # fmt: skip
    objective = Objective.from_config(config)
    own = TorchBackend(tiny_model, config, 0, dtype="float64").forward_backward(groups, objective)
    teacher = load(tied_model)
    for datum in (item for group in groups for item in group):
        with torch.no_grad():
            taught = all_logprobs(teacher, datum).topk(K, dim=-1)
        ids, values = np.zeros((2, len(datum.token_ids), K))
        ids[1:], values[1:] = taught.indices, taught.values
        datum.teacher_topk_ids, datum.teacher_topk_logprobs = ids.astype(np.int32), values.astype(np.float32)
    backend = TorchBackend(tiny_model, TrainerConfig(), 0, dtype="float64")
    given = backend.forward_backward(groups, objective)
    assert given.loss_sum == pytest.approx(own.loss_sum, rel=1e-6)


def test_each_datum_has_its_own_teacher(tiny_model: Path, tied_model: Path) -> None:
    groups = without_advantages(make_groups(LENGTHS, PROMPTS))
    for datum in groups[1]:
        datum.teacher = "self"
    models = {"": load(tied_model), "self": load(tiny_model)}

    def term(datum: Datum, policy: Tensor) -> Tensor:
        ids = torch.from_numpy(datum.token_ids[1:].astype(np.int64))[:, None]
        with torch.no_grad():
            taught = all_logprobs(models[datum.teacher], datum).gather(1, ids)[:, 0]
        own = policy.gather(1, ids)[:, 0]
        return own * (own.detach() - taught)

    assert_gradients(
        tiny_model, groups, term, loss={"name": "policy_gradient", "importance_ratio": False}, distillation={},
        teachers={"default": {"path": str(tied_model)}, "self": {"path": str(tiny_model)}},
        tokens_per_micro_batch=4096,
    )  # fmt: skip


def test_sampled_distillation_brings_the_policy_to_its_teacher(tiny_model: Path, tied_model: Path) -> None:
    """On samples of the policy itself; the whole KL over the vocabulary goes down, though no step sees it."""
    config = TrainerConfig.model_validate({
        "loss": {"name": "policy_gradient", "importance_ratio": False}, "distillation": {},
        "teachers": {"default": {"path": str(tied_model)}}, "optimizer": {"learning_rate": 0.01},
    })  # fmt: skip
    backend = TorchBackend(tiny_model, config, 0)
    objective = Objective.from_config(config)
    prompt = torch.arange(2, 8)[None]
    with torch.no_grad():
        target = load(tied_model)(input_ids=prompt).logits[0, -1].log_softmax(-1)
    generator = torch.Generator().manual_seed(0)

    def next_token() -> Tensor:
        with torch.no_grad():
            return backend.policy.model(input_ids=prompt).logits[0, -1].double().log_softmax(-1)

    def divergence() -> float:
        policy = next_token()
        return float((policy.exp() * (policy - target)).sum())

    start = divergence()
    for _ in range(12):
        tokens = torch.multinomial(next_token().exp(), 64, replacement=True, generator=generator)
        zeros = np.zeros(7, np.float32)
        weights = np.array([0, 0, 0, 0, 0, 0, 1], np.float32)
        data = [
            Datum(np.append(prompt[0].numpy(), token).astype(np.int32), weights, zeros, zeros)
            for token in tokens.numpy()
        ]
        backend.forward_backward([data], objective)
        backend.optim_step(len(data), 0.01)
    assert divergence() < 0.5 * start


def test_a_teacher_that_is_not_there_is_named(tiny_model: Path, tied_model: Path) -> None:
    config = TrainerConfig.model_validate({"distillation": {}, "teachers": {"math": {"path": str(tied_model)}}})
    backend = TorchBackend(tiny_model, config, 0)
    groups = make_groups([[2]], [3])
    with pytest.raises(InvalidDatum, match=r"names no teacher, and none is the default; trainer\.teachers has math"):
        backend.forward_backward(groups, Objective.from_config(config))
    groups[0][0].teacher = "maths"
    with pytest.raises(InvalidDatum, match="names the teacher 'maths'"):
        backend.forward_backward(groups, Objective.from_config(config))


def test_a_teacher_with_another_vocabulary_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    small = transformers.LlamaConfig(
        vocab_size=VOCABULARY + 1, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    transformers.LlamaForCausalLM(small).save_pretrained(tmp_path)
    config = TrainerConfig.model_validate({"distillation": {}, "teachers": {"default": {"path": str(tmp_path)}}})
    with pytest.raises(ConfigError, match=r"teachers\.default\.path.*51 tokens, the policy's 50"):
        TorchBackend(tiny_model, config, 0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"distillation": {}}, "distillation needs a teacher"),
        ({"teachers": {"a": {"path": "x"}}}, r"teachers\.a is not used"),
        ({"distillation": {}, "teachers": {"a": {"path": "x"}}, "backend": "fsdp"}, "loads no teacher"),
        ({"corrections": [{"name": "icepop"}]}, "contradicts behaviour"),
        ({"aggregation": "constant"}, "aggregation_length = None"),
        ({"aggregation_length": 8}, "set both or neither"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainerConfig.model_validate(fields)
