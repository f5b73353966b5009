"""Publications into the model: read and checked in any thread, swapped in the engine's thread between two tokens."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from paceline.rpc import errors
from paceline.weights.manifest import Manifest, content_digest

_PEFT_PREFIX = "base_model.model."
_ADAPTER = "policy"


@dataclass
class Publication:
    """A version read from its directory; every tensor has the checksum that the manifest says."""

    weight_version: int
    manifest: Manifest
    tensors: dict[str, torch.Tensor]


def sha256_of(tensor: torch.Tensor) -> str:
    """Hexadecimal SHA-256 of the tensor's little-endian bytes in row-major order."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def read_publication(directory: Path, weight_version: int) -> Publication:
    """Read every tensor of a publication. DataLoss names what is torn, missing or altered."""
    manifest = Manifest.read(directory)
    if manifest.weight_version != weight_version:
        raise errors.DataLoss(f"{directory} holds weight version {manifest.weight_version}, not {weight_version}")
    by_file: dict[str, list[Any]] = {}
    for entry in manifest.tensors:
        by_file.setdefault(entry.file, []).append(entry)
    tensors: dict[str, torch.Tensor] = {}
    for name, entries in by_file.items():
        try:
            with safe_open(str(directory / name), framework="pt") as file:
                for entry in entries:
                    found = file.get_slice(entry.name)
                    if (found.get_dtype(), list(found.get_shape())) != (entry.dtype, entry.shape):
                        raise errors.DataLoss(f"tensor {entry.name} of {directory} is not as its manifest says")
                    tensors[entry.name] = file.get_tensor(entry.name)
        except (OSError, SafetensorError) as error:
            raise errors.DataLoss(f"{directory / name} cannot be read: {error}") from error
    for entry in manifest.tensors:
        if sha256_of(tensors[entry.name]) != entry.sha256:
            raise errors.DataLoss(f"tensor {entry.name} of {directory} does not have the checksum in its manifest")
    return Publication(weight_version, manifest, tensors)


class ModelWeights:
    """The parameters being served. `swap` runs in the engine's thread; what does not fit changes nothing."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kind = ""
        self._adapter_config: dict[str, Any] | None = None

    @torch.no_grad()
    def swap(self, publication: Publication) -> bool:
        """Copy a publication into the model; True when base weights or modules changed, False when only an adapter did.

        FailedPrecondition names the tensor that does not fit.
        """
        kind = publication.manifest.kind
        if self._kind not in ("", kind):
            raise errors.FailedPrecondition(
                f"weight version {publication.weight_version} is {kind!r} and the engine serves {self._kind!r}; "
                "restart the engine to change the kind of weights"
            )
        changed = kind == "full"
        if kind == "adapter":
            changed = self._inject(publication)
        targets = self._targets(publication)
        self._check(publication, targets)
        for name, tensor in publication.tensors.items():
            targets[name].copy_(tensor)
        self._kind = kind
        return changed

    def digest(self, publication: Publication) -> str:
        """Content digest of what the model holds for the names of a publication.

        A tensor that is held in another dtype than published counts with the published bytes, which were checked when
        they were read.
        """
        targets = self._targets(publication)
        entries = []
        for entry in publication.manifest.tensors:
            held, read = targets[entry.name], publication.tensors[entry.name]
            source = held if held.dtype == read.dtype else read
            entries.append((entry.name, entry.dtype, entry.shape, sha256_of(source)))
        return content_digest(entries)

    def _targets(self, publication: Publication) -> dict[str, torch.Tensor]:
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        if publication.manifest.kind == "full":
            return parameters
        found = {}
        for name in publication.tensors:
            module, _, leaf = name.removeprefix(_PEFT_PREFIX).rpartition(".")
            for candidate in (f"{module}.{_ADAPTER}.{leaf}", f"{module}.{leaf}.{_ADAPTER}", f"{module}.{leaf}"):
                if candidate in parameters:
                    found[name] = parameters[candidate]
        return found

    def _check(self, publication: Publication, targets: dict[str, torch.Tensor]) -> None:
        where = f"weight version {publication.weight_version}"
        for name, tensor in publication.tensors.items():
            target = targets.get(name)
            if target is None:
                raise errors.FailedPrecondition(f"{where} holds tensor {name}, which the engine's model does not have")
            if target.shape != tensor.shape:
                raise errors.FailedPrecondition(
                    f"{where}: tensor {name} has shape {list(tensor.shape)}, the engine's has {list(target.shape)}"
                )
        if publication.manifest.kind == "full":
            given = {targets[name].data_ptr() for name in publication.tensors}
            missing = [name for name, target in targets.items() if target.data_ptr() not in given]
            if missing:
                raise errors.FailedPrecondition(f"{where} lacks {len(missing)} tensors of the model, as {missing[0]}")

    def _inject(self, publication: Publication) -> bool:
        """Put the LoRA layers into the model when the first adapter comes; their weights are float32."""
        config = publication.manifest.adapter_config or {}
        if self._adapter_config is not None:
            if config != self._adapter_config:
                raise errors.FailedPrecondition(
                    f"adapter_config of weight version {publication.weight_version} differs from the one being served; "
                    "restart the engine"
                )
            return False
        from peft import PeftConfig, inject_adapter_in_model

        settings = PeftConfig.from_peft_type(**{**config, "inference_mode": True})
        inject_adapter_in_model(settings, self._model, _ADAPTER)
        for name, parameter in self._model.named_parameters():
            parameter.requires_grad_(False)
            if f".{_ADAPTER}" in name:
                parameter.data = torch.zeros_like(parameter.data, dtype=torch.float32)
        self._model.eval()
        self._adapter_config = config
        return True
