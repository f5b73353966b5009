"""Every model family names all tensors and parameters, and moves them to any number of ranks and back bit for bit."""

from __future__ import annotations

import pytest
import torch
import transformers

from paceline.config import ConfigError
from paceline.plugins import registry
from services.trainer.megatron.mapping import Padded, Rule

NAMES = registry("model_family").available()


def model_of(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(registry("model_family").load(name).tiny())


def rules_of(name: str, config: transformers.PretrainedConfig) -> list[Rule]:
    family = registry("model_family").load(name)(config)
    return [rule for number in range(config.num_hidden_layers) for rule in family.layer(number)]


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_of_a_layer_has_one_rule(name: str) -> None:
    model = model_of(name)
    layers = {tensor for tensor, _ in model.named_parameters() if ".layers." in tensor}
    rules = rules_of(name, model.config)
    assert {tensor for rule in rules for tensor in rule.tensors} == layers
    places = [(tensor, rule.expert) for rule in rules for tensor in rule.tensors]
    assert len(places) == len(set(places))
    assert model.config.model_type == name


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_tensors_come_back_from_their_parts_bit_for_bit(name: str, ranks: int) -> None:
    model = model_of(name)
    tensors = {tensor: item.detach() for tensor, item in model.named_parameters()}
    for rule in rules_of(name, model.config):
        own = [tensors[tensor] if rule.expert is None else tensors[tensor][rule.expert] for tensor in rule.tensors]
        parts = [rule.part(own, rank, ranks) for rank in range(ranks)]
        assert len({part.shape for part in parts}) == 1
        if rule.cut is not None:
            assert sum(part.numel() for part in parts) == sum(item.numel() for item in own)
        back = rule.whole(parts)
        assert all(torch.equal(one, other) for one, other in zip(back, own, strict=True)), rule


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_a_folder_has_in_parts_are_found(name: str, tmp_path) -> None:
    from services.trainer.megatron.tensors import read_row
    from services.trainer.model.shards import PieceReader

    model = model_of(name)
    model.save_pretrained(tmp_path)
    reader = PieceReader(tmp_path)
    family = registry("model_family").load(name)(model.config)
    tensors = {tensor: item.detach() for tensor, item in model.named_parameters()}
    for rule in rules_of(name, model.config):
        for tensor in rule.tensors:
            wanted = tensors[tensor] if rule.expert is None else tensors[tensor][rule.expert]
            assert torch.equal(read_row(reader, family, tensor, rule.expert), wanted), tensor


def test_a_vocabulary_is_filled_up_with_rows_that_do_not_come_back() -> None:
    rule = Rule("output_layer.weight", ("lm_head.weight",), Padded(5, 6), cut=0)
    head = torch.randn(5, 3)
    parts = [rule.part([head], rank, 2) for rank in range(2)]
    assert [len(part) for part in parts] == [3, 3]
    assert torch.equal(rule.whole(parts)[0], head)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"attention_bias": True}), ("llama", {"hidden_act": "gelu"}),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}), ("qwen3", {"attention_bias": True}),
        ("qwen3_moe", {"decoder_sparse_step": 2}), ("qwen3_moe", {"mlp_only_layers": [0]}),
    ],
)  # fmt: skip
def test_what_a_family_cannot_express_is_refused_by_name(name: str, change: dict) -> None:
    family = registry("model_family").load(name)
    config = family.tiny()
    for key, value in change.items():
        setattr(config, key, value)
    with pytest.raises(ConfigError, match=next(iter(change))):
        family(config)
