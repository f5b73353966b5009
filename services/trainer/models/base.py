"""What a model family is: the shape of its model for megatron-core, and which tensors its parameters are made of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from services.trainer.megatron.mapping import Rule


class ModelFamily(Protocol):
    """Models of one `model_type` of transformers, which is the name that the family is registered under.

    Rules must name every tensor of the Hugging Face model exactly once (copies aside), whatever its size, and every
    parameter of the megatron model. A conformance test checks both for all families.
    """

    def __init__(self, config: Any) -> None:
        """`config` is the model's transformers configuration. ConfigError names what the family cannot express."""
        ...

    def fields(self) -> dict[str, Any]:
        """Fields of megatron-core's TransformerConfig that this model sets apart from others of its size."""
        ...

    def layer(self, number: int) -> list[Rule]:
        """The parameters of layer `number` (from 0); names of parameters are those inside of the layer."""
        ...

    def stored(self, tensor: str, row: int) -> list[str]:
        """Names in model folders of the parts of a row of `tensor`, for one that folders have in parts. Mostly none."""
        ...

    @staticmethod
    def tiny() -> Any:
        """A transformers configuration of a few thousand parameters, with all that the family has, for its tests."""
        ...
