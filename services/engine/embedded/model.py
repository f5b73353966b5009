"""Loading the base model from a local folder, and proof that this engine's attention computes what the model means."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from paceline.config import ConfigError
from services.engine.embedded import attention
from services.engine.embedded.decoder import Decoder
from services.engine.embedded.prefixes import Fill

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load_model(path: str, dtype: str, device: str, max_length: int) -> Any:
    """The model in eval mode without gradients, with stock attention. ConfigError names what is wrong; no network."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"model.path = {path!r} has no config.json; it must be a local Hugging Face model folder")
    model: Any = AutoModelForCausalLM.from_pretrained(  # type: ignore[arg-type]
        path, dtype=DTYPES[dtype], attn_implementation="sdpa", local_files_only=True
    )
    model.eval().requires_grad_(False).to(device)
    for parameter in model.parameters():
        # Out of the mapped file, whose tensors stand at odd addresses: products with them are slower, and may round
        # otherwise.
        parameter.data = parameter.data.clone()
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window and getattr(config, "use_sliding_window", True) and window < max_length:
        raise ConfigError(
            f"{path}: sliding-window attention of {window} tokens is not supported by the embedded engine; "
            f"set engine.max_sequence_length (now {max_length}) to at most {window}"
        )
    limit = getattr(config, "max_position_embeddings", None)
    if limit and limit < max_length:
        raise ConfigError(f"engine.max_sequence_length = {max_length} is over the model's {limit} positions ({path})")
    return model


@torch.inference_mode()
def plug_attention(model: Any, decoder: Decoder) -> None:
    """Switch the model to the engine's attention, and compare its logits with the stock ones on a few tokens.

    ConfigError when they differ: a model whose forward does more than layers and head is then refused at the start
    instead of giving wrong log-probabilities.
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = [(7 * i + 1) % vocabulary for i in range(5)]
    expected = model(input_ids=torch.tensor([ids], device=decoder.device), use_cache=False).logits[0, -1].float()
    attention.register()
    model.set_attn_implementation(attention.NAME)
    try:
        decoder.fill([Fill(decoder.spare_slot, ids)])
        found = decoder.logits_of(decoder.spare_slot).float()
    except attention.UnsupportedAttention as error:
        raise ConfigError(str(error)) from error
    gap = (found - expected).abs().max().item()
    spread = (expected.amax() - expected.amin()).item()
    if gap > 0.05 * max(spread, 1e-3):
        raise ConfigError(
            f"{type(model).__name__} is not supported by engine.backend embedded: its logits differ by {gap:.3g} "
            f"(spread {spread:.3g}) between the engine's attention and transformers' own"
        )
    log.info("attention check: largest logit difference %.2e of spread %.2e", gap, spread)
