"""Datums from the wire, checked at the boundary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from paceline import arrays
from paceline.api.trainer.v1 import trainer_service_pb2 as pb
from paceline.plugins import UnknownPlugin, registry
from paceline.rpc import errors
from services.trainer.datum import Datum, InvalidDatum
from services.trainer.objective import Objective

MAX_DATA = 4096
MAX_TOKENS = 2**20
_INPUTS = ("weights", "advantages", "sampler_logprobs", "reference_logprobs")


def decode_data(messages: Sequence[pb.Datum], vocabulary: int) -> list[Datum]:
    """Datums of a request. InvalidArgument names the datum and the field; ResourceExhausted names the limit."""
    if not messages:
        raise errors.InvalidArgument("data is empty; send at least one datum")
    if len(messages) > MAX_DATA:
        raise errors.ResourceExhausted(f"{len(messages)} datums in one request; the limit is {MAX_DATA}, split it")
    data = [_decode(message, f"data[{index}]") for index, message in enumerate(messages)]
    tokens = sum(len(datum.token_ids) for datum in data)
    if tokens > MAX_TOKENS:
        raise errors.ResourceExhausted(f"{tokens} tokens in one request; the limit is {MAX_TOKENS}, split it")
    try:
        for datum in data:
            datum.check(vocabulary)
    except InvalidDatum as error:
        raise errors.InvalidArgument(str(error)) from error
    return data


def _decode(message: pb.Datum, where: str) -> Datum:
    unknown = sorted(set(message.loss_inputs) - set(_INPUTS))
    if unknown:
        raise errors.InvalidArgument(f"{where}.loss_inputs has {unknown[0]!r}; known are {', '.join(_INPUTS)}")
    try:
        token_ids = arrays.from_wire(message.token_ids, f"{where}.token_ids", "int32")
        count = len(token_ids)
        given = {
            name: arrays.from_wire(value, f"{where}.loss_inputs[{name!r}]", "float32", count)
            for name, value in message.loss_inputs.items()
        }
    except ValueError as error:
        raise errors.InvalidArgument(str(error)) from error
    zeros = np.zeros(count, np.float32)
    return Datum(
        token_ids=token_ids, weights=given.get("weights", zeros), advantages=given.get("advantages", zeros),
        sampler_logprobs=given.get("sampler_logprobs", zeros), temperature=message.temperature or 1.0,
        behaviour_logprobs=given.get("sampler_logprobs"), reference_logprobs=given.get("reference_logprobs"),
        name=where,
    )  # fmt: skip


def make_objective(name: str, parameters: dict[str, Any], data: Sequence[Datum]) -> Objective:
    """A registered loss with its parameters. InvalidArgument for an unknown one, or one that the data do not suit."""
    if ":" in name:
        raise errors.InvalidArgument(f"loss {name!r}: only built-in losses may be asked for over the wire")
    try:
        plugin = registry("loss").load(name)
        plugin.Options.model_validate(parameters)
    except UnknownPlugin as error:
        raise errors.InvalidArgument(str(error)) from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise errors.InvalidArgument(f"loss_parameters[{where!r}]: {first['msg']}") from error
    objective = Objective.from_spec({"loss": {"name": name, **parameters}})
    for datum in data if objective.needs_reference else ():
        if datum.reference_logprobs is None:
            raise errors.InvalidArgument(f"{datum.name}.loss_inputs: loss {name!r} needs 'reference_logprobs'")
    return objective
