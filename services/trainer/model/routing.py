"""Routing replay: tokens go through the experts that the engine recorded, with weights from the present router.

Why: where sampler and policy choose other experts for a token they are other functions, and no ratio of their
log-probabilities corrects that. Source: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training
and Inference Routers" (R3). With s = softmax(router logits) and the recorded set K the weights are s_i, i in K, over
their sum where the model normalizes them; the gradient goes through s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config import ConfigError
from paceline.routing import check_routing
from services.trainer.datum import Datum, InvalidDatum
from services.trainer.model.layers import decoder_layers

_ROUTERS = "TopKRouter"
"""How transformers' routers are called; they return (logits, scores [tokens, top_k], experts [tokens, top_k])."""
ARGUMENT = "paceline_routing"
"""Name under which the routing passes through the model: an argument, so that a layer that is computed again in the
backward pass gets it again."""


class RoutingReplay:
    """The routers of a model, which do as they are told. `states` of a pass take the argument ARGUMENT."""

    def __init__(self, model: Any, path: object) -> None:
        self._routers: list[Any] = []
        self._counts: Tensor | None = None
        for layer in decoder_layers(model):
            found: list[Any] = [item for item in layer.modules() if type(item).__name__.endswith(_ROUTERS)]
            if len(found) > 1:
                raise ConfigError(f"trainer.routing_replay: a layer of {path} has {len(found)} routers")
            place = len(self._routers) if found else None
            if found:
                _check_rule(found[0], path)
                found[0].paceline_chosen = None
                found[0].forward = self._told(found[0], found[0].forward)
                self._routers += found
            layer.forward = _passed_on(layer.forward, found[0] if found else None, place)
        if not self._routers:
            raise ConfigError(
                f"trainer.routing_replay = true: {type(model).__name__} of model.path = {str(path)!r} has no experts "
                "whose router is known; leave it out"
            )

    def check(self, datum: Datum) -> None:
        """InvalidDatum, with the datum's name, unless it has a routing that fits."""
        if datum.routing is None:
            raise InvalidDatum(
                f"{datum.name}: no routing was recorded, and trainer.routing_replay needs it; does the episode hand on "
                "what the engine records?"
            )
        router = self._routers[0]
        try:
            check_routing(
                datum.routing, len(datum.token_ids), len(self._routers), int(router.top_k), int(router.num_experts)
            )
        except ValueError as error:
            raise InvalidDatum(f"{datum.name}: {error}") from error

    def argument(self, routing: np.ndarray | None, device: torch.device) -> dict[str, Tensor]:
        """The argument of a pass over rows with a routing [rows, width, layers, top_k], -1 where it is free."""
        if routing is None:
            return {}
        return {ARGUMENT: torch.from_numpy(routing).to(device).flatten(0, 1).transpose(0, 1).long()}

    def take_counts(self) -> dict[str, float]:
        """Of the recorded choices in passes with a gradient, how many the present router would not have made, and how
        many there were; both start anew. Where layers are computed twice both are twice as many."""
        differing, choices = self._counts.tolist() if self._counts is not None else (0, 0)
        self._counts = None
        return {"routing_differing": float(differing), "routing_choices": float(choices)}

    def _told(self, router: Any, own: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def forward(hidden: Tensor) -> Any:
            logits, scores, experts = own(hidden)
            given = router.paceline_chosen
            if given is None:
                return logits, scores, experts
            known = given >= 0
            chosen = torch.where(known, given, experts)
            if torch.is_grad_enabled():
                missing = ~(chosen.unsqueeze(2) == experts.unsqueeze(1)).any(2)
                counts = torch.stack([missing.sum(), known.sum()])
                self._counts = counts if self._counts is None else self._counts + counts
            return logits, scores_of(logits, chosen, getattr(router, "norm_topk_prob", True)), chosen

        return forward


def scores_of(logits: Tensor, chosen: Tensor, normalize: bool) -> Tensor:
    """Weights [tokens, top_k] of the chosen experts (int64) under router logits [tokens, experts], in their dtype."""
    kind = torch.promote_types(logits.dtype, torch.float32)
    values = logits.softmax(-1, dtype=kind).gather(-1, chosen)
    if normalize:
        values = values / values.sum(-1, keepdim=True)
    return values.to(logits.dtype)


def _passed_on(forward: Callable[..., Any], router: Any, place: int | None) -> Callable[..., Any]:
    """A layer's forward that takes the argument, and tells its router for as long as it runs."""

    def run(*arguments: Any, **named: Any) -> Any:
        routing = named.pop(ARGUMENT, None)
        if routing is None or router is None or place is None:
            return forward(*arguments, **named)
        router.paceline_chosen = routing[place]
        try:
            return forward(*arguments, **named)
        finally:
            router.paceline_chosen = None

    return run


@torch.no_grad()
def _check_rule(router: Any, path: object) -> None:
    """ConfigError unless the model weighs its own choices as `scores_of` would, to the bit."""
    weight = next(router.parameters())
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, weight.shape[-1], generator=generator).to(weight)
    logits, scores, experts = router(hidden)
    found = scores_of(logits, experts, getattr(router, "norm_topk_prob", True))
    # In float64 routers are less exact than that, as they go through float32.
    same = torch.allclose(found, scores, atol=1e-5) if logits.dtype == torch.float64 else torch.equal(found, scores)
    if not same:
        raise ConfigError(
            f"trainer.routing_replay: {type(router).__name__} of {path} weighs its experts by another rule than "
            "softmax over all, then the chosen ones; leave it out"
        )
