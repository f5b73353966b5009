"""Loads a policy from a Hugging Face folder and runs its forward pass on packed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from paceline.config import ConfigError
from paceline.config.trainer import LoraConfig
from services.trainer.datum import Datum
from services.trainer.model import attention
from services.trainer.model.attention import Rows
from services.trainer.model.logprobs import TokenScores, token_logprobs, token_scores, top_logprobs
from services.trainer.model.routing import RoutingReplay
from services.trainer.packing import PackedBatch, Row, pack

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER = "default"


class Policy:
    """A causal language model whose trainable parameters are all of it, or a LoRA adapter over a frozen base.

    `trainable` maps published names to parameters: Hugging Face names, or PEFT names for an adapter.
    """

    def __init__(
        self, path: Path, dtype: torch.dtype, lora: LoraConfig | None, seed: int, device: str, frozen: bool = False
    ) -> None:
        self.path = path
        self.device = torch.device(device)
        # All parameters are loaded in float32 when they are trained: the float32 masters are made from them.
        load_dtype = dtype if lora is not None or frozen or dtype == torch.float64 else torch.float32
        self.model = load_model(path, load_dtype, self.device)
        self._compute = load_dtype
        self.vocabulary = int(self.model.config.vocab_size)
        self.hidden_size = int(self.model.config.hidden_size)
        self._short_rows_eager = self.device.type == "cpu"
        self.shares_prefixes = _plain_attention(self.model.config)
        self.around: Callable[..., tuple[Tensor, ...]] = _call
        """Calls a pass; replaced where parameters are whole only inside of a wrapper's forward."""
        self.replay: RoutingReplay | None = None
        """Makes the passes of batches with a routing follow it."""
        self.peft: PeftModel | None = None
        self.trainable: dict[str, nn.Parameter]
        if frozen:
            self.model.requires_grad_(False)
            self.trainable = {}
        elif lora is None:
            self.trainable = dict(self.model.named_parameters())
        else:
            self.peft = _add_adapter(self.model, lora, seed)
            named = self.peft.named_parameters()
            self.trainable = {_adapter_name(name): item for name, item in named if item.requires_grad}
        self.logit_scale = _logit_scale(self.model.config)
        self._check_head()
        self.streams = self.shares_prefixes and self._takes_rows()
        """Whether micro-batches may be streams of rows; see PackedBatch.row_widths."""
        # From here on: masters take over the parameters and leave copies in this type.
        self._compute = dtype

    def score(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each predicted token of the batch: two [N], see token_logprobs."""
        scores = self.scores(batch)
        return scores.logprobs, scores.entropy

    def scores(self, batch: PackedBatch, chosen: Tensor | None = None, entropy_gradient: bool = False) -> TokenScores:
        """As `score`, with the log-probabilities of the ids `chosen` (int64 [N, k]); see token_scores."""
        ids = () if chosen is None else (chosen,)
        return TokenScores(*self.around(self._scores, batch, entropy_gradient, *ids))

    def _scores(self, batch: PackedBatch, entropy_gradient: bool, chosen: Tensor | None = None) -> tuple[Tensor, ...]:
        targets = torch.from_numpy(batch.targets).to(self.device)
        found = token_scores(
            self.states(batch), self._head().weight, targets, self._factor(batch), chosen, entropy_gradient
        )
        return found.logprobs, found.entropy, found.chosen

    @torch.no_grad()
    def teach(self, batch: PackedBatch, k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each predicted token its log-probability [N], and ids and log-probabilities of the k likeliest [N, k]."""
        states, head, factor = self.states(batch), self._head().weight, self._factor(batch)
        logprobs, _ = token_logprobs(states, head, torch.from_numpy(batch.targets).to(self.device), factor)
        return logprobs, *top_logprobs(states, head, factor, k)

    def states(self, batch: PackedBatch) -> Tensor:
        """[N, D]: the last hidden state that each predicted token is predicted from."""
        inputs = torch.from_numpy(batch.token_ids).to(self.device)
        positions = torch.from_numpy(batch.position_ids).to(self.device)
        told = self.replay.argument(batch.routing, self.device) if self.replay is not None else {}
        if batch.row_widths is not None:
            rows = Rows(batch, self.device, self._compute)
            hidden = self._hidden(inputs, positions, None, attention.NAME, rows=rows, **told)
        else:
            kernel = "eager" if self._short_rows_eager and inputs.shape[1] <= attention.SHORT_ROW else "sdpa"
            hidden = self._hidden(inputs, positions, self._mask(batch, kernel), kernel, **told)
        return hidden.flatten(0, 1).index_select(0, torch.from_numpy(batch.source).to(self.device))

    def _factor(self, batch: PackedBatch) -> Tensor:
        """[N]: what logits are multiplied with."""
        return self.logit_scale / torch.from_numpy(batch.temperature).to(self.device)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The base model only; for full parameters nothing changes."""
        with self.peft.disable_adapter() if self.peft is not None else nullcontext():
            yield

    def set_dropout(self, active: bool) -> None:
        """Turn the adapter's dropout on for training passes; everything else always runs as in evaluation."""
        for name, module in self.model.named_modules():
            if "lora_dropout" in name and isinstance(module, nn.Dropout):
                module.train(active)

    def _mask(self, batch: PackedBatch, kernel: str) -> Tensor | None:
        """[R, 1, W, W]: what may be seen, as the kernel takes it; None lets the model be causal."""
        if batch.visible is None:
            return None
        visible = torch.from_numpy(batch.visible).to(self.device).unsqueeze(1)
        if kernel == "sdpa":
            return visible
        blocked = torch.finfo(self._compute).min
        return torch.zeros(visible.shape, dtype=self._compute, device=self.device).masked_fill_(~visible, blocked)

    def _head(self) -> nn.Linear:
        return cast(nn.Linear, self.model.get_output_embeddings())

    def _hidden(
        self, inputs: Tensor, positions: Tensor | None, mask: Tensor | None, kernel: str = "sdpa", **named: Any
    ) -> Tensor:
        if self.model.config._attn_implementation != kernel:
            self.model.set_attn_implementation(kernel)
        backbone = self.model.base_model
        output = backbone(input_ids=inputs, position_ids=positions, attention_mask=mask, use_cache=False, **named)
        return output.last_hidden_state

    @torch.no_grad()
    def _check_head(self) -> None:
        """Refuse a family that does something to its logits that `score` does not know."""
        inputs = torch.arange(min(4, self.vocabulary), device=self.device).unsqueeze(0)
        expected = self.model(input_ids=inputs, use_cache=False).logits.double()
        got = (self.logit_scale * self._head()(self._hidden(inputs, None, None))).double()
        if not torch.allclose(expected, got, rtol=1e-2, atol=1e-2):
            raise ConfigError(
                f"model.path = {str(self.path)!r}: the torch backend cannot train {self.model.config.model_type}: its "
                "logits are not a linear function of the last hidden state (a soft cap?)"
            )

    @torch.no_grad()
    def _takes_rows(self) -> bool:
        """Whether the family's attention can be replaced by ours: tried on two rows, against each of them alone."""
        ids = np.arange(5) % self.vocabulary
        zeros, ones = np.zeros(5, np.float32), np.array([0, 1, 1, 1, 1], np.float32)
        data = [Datum(ids[:count], ones[:count], zeros[:count], zeros[:count]) for count in (5, 3)]
        found = self.states(pack([Row((0,), 0, 5), Row((1,), 0, 3)], data, True, stream=True))
        alone = [self.states(pack([Row((0,), 0, len(item.token_ids))], [item], True)) for item in data]
        wanted = torch.cat(alone)
        return bool(torch.allclose(found, wanted, rtol=1e-2, atol=1e-2 * float(wanted.abs().max())))


def _call(work: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> tuple[Tensor, ...]:
    return work(*arguments)


def load_model(path: Path, dtype: torch.dtype, device: torch.device) -> Any:
    """The causal language model of a local folder, in evaluation mode. ConfigError when the folder is not one."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path = {str(path)!r} is not a Hugging Face model folder: it has no config.json")
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
    )
    if dtype == torch.float64:
        # The grouped products of experts know no such numbers.
        cast(Any, model).set_experts_implementation("eager")
    return cast(Any, model).to(device).eval()


def _add_adapter(model: Any, lora: LoraConfig, seed: int) -> PeftModel:
    # Imported where it is used: it takes seconds, which full-parameter training need not pay.
    from peft import LoraConfig as PeftLoraConfig
    from peft import get_peft_model

    torch.manual_seed(seed)
    targets = lora.target_modules if lora.target_modules == "all-linear" else list(lora.target_modules)
    config = PeftLoraConfig(
        r=lora.rank, lora_alpha=cast(int, lora.alpha), lora_dropout=lora.dropout, target_modules=targets, bias="none",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    try:
        peft = get_peft_model(model, config, adapter_name=ADAPTER, autocast_adapter_dtype=True)
    except ValueError as error:
        raise ConfigError(f"trainer.lora.target_modules = {lora.target_modules!r}: {error}") from error
    return cast("PeftModel", peft.eval())


def _adapter_name(parameter: str) -> str:
    """PEFT's name of a tensor in a file, which leaves the adapter's name out."""
    return parameter.replace(f".{ADAPTER}.", ".")


def _plain_attention(config: Any) -> bool:
    """Whether every layer sees all earlier tokens, so that our own block mask may replace the model's."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return kinds == {"full_attention"} and not sliding


def _logit_scale(config: Any) -> float:
    """Factor that the family applies to its logits."""
    if getattr(config, "logits_scaling", None):
        return 1.0 / config.logits_scaling
    return float(getattr(config, "logit_scale", None) or 1.0)
