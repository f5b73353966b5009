"""A tiny random Qwen3-MoE, and its routing as its own routers choose it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tiny_policies import VOCABULARY
from tokenizers import Tokenizer, models, pre_tokenizers

LAYERS, EXPERTS, TOP_K = 3, 6, 2
HEAD: dict[str, Any] = {"head_dim": 8}


def save_moe(
    path: Path, experts: int = EXPERTS, dense_layers: tuple[int, ...] = (1,), alike: float | None = None
) -> Path:
    """Three layers, `dense_layers` without experts. `alike`: routers see experts in threes that are so close."""
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=False,
        initializer_range=0.3, num_experts=experts, num_experts_per_tok=TOP_K, moe_intermediate_size=24,
        norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=list(dense_layers), bos_token_id=0, eos_token_id=1,
        pad_token_id=0, **HEAD,
    )  # fmt: skip
    model: Any = transformers.Qwen3MoeForCausalLM(config)
    if alike is not None:
        for router in routers(model):
            with torch.no_grad():
                for place in (1, 2):
                    router.weight[place::3] = router.weight[::3] + alike * torch.randn_like(router.weight[::3])
    model.save_pretrained(path)
    vocabulary = {f"t{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1").save_pretrained(path)
    return path


def routers(model: Any) -> list[Any]:
    return [item for item in model.modules() if type(item).__name__ == "Qwen3MoeTopKRouter"]


def routing_of(path: Path, token_ids: np.ndarray, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """[num_tokens - 1, layers, top_k] of one sequence, by transformers alone."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    model.set_experts_implementation("eager")
    seen: list[torch.Tensor] = []
    for router in routers(model):
        router.register_forward_hook(lambda module, arguments, output: seen.append(output[2]))
    with torch.no_grad():
        model(torch.tensor([token_ids.tolist()]))
    return torch.stack(seen, 1).numpy().astype(np.uint8)[:-1]
