"""Reads tensors of a Hugging Face folder: memory-mapped safetensors, only the slices asked for.

Knows nothing of models. `DummyWeights` gives random tensors of the same names and shapes, so that a server runs
at a model's real size where its weights are not at hand. Pickled checkpoints are never opened.
"""

import json
import math
import zlib
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dlmserve.errors import CheckpointError


class Ask(NamedTuple):
    """The tensor `name` of full shape `shape`, or its slice start..stop - 1 along `dim`.

    `part` tells apart the slices that a rank asks of one tensor, such as its queries, keys and values. `dtype`: wanted
    whatever the model's is.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0
    stop: int = 0
    part: int = 0
    dtype: torch.dtype | None = None


class Weights(Protocol):
    """Source of a model's tensors, already in the wanted dtype and on the wanted device."""

    def get(self, ask: Ask) -> Tensor: ...


class SafetensorsWeights:
    """Raises CheckpointError for a missing file or tensor, or a shape that the config does not imply."""

    def __init__(self, folder: str, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device
        self._file_of = _index(Path(folder))
        self._open_files: dict[Path, safe_open] = {}

    def get(self, ask: Ask) -> Tensor:
        name, shape, dim, start, stop, _, dtype = ask
        source = self._slice(name)
        found = tuple(source.get_shape())
        if found != shape:
            raise CheckpointError(f"tensor {name} has shape {found}; config.json implies {shape}")
        columns = slice(None) if dim is None else slice(start, stop)
        part = source[:, columns] if dim == 1 else source[columns]
        # A copy even where dtype and device fit: a slice of the mapped file would keep the file's pages in use.
        return part.to(device=self._device, dtype=dtype or self._dtype, copy=True)

    def _slice(self, name: str):  # noqa: ANN202  (safetensors has no public type for it)
        path = self._file_of.get(name)
        if path is None:
            raise CheckpointError(f"the checkpoint has no tensor {name}; it has {len(self._file_of)} others")
        if path not in self._open_files:
            try:
                self._open_files[path] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is no readable safetensors file: {error}") from error
        return self._open_files[path].get_slice(name)


class DummyWeights:
    """Random weights, the same for every tensor-parallel degree: a tensor's values follow from its name."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        self._dtype, self._device = dtype, device

    def get(self, ask: Ask) -> Tensor:
        name, shape, dim, start, stop, _, dtype = ask
        options = {"dtype": dtype or self._dtype, "device": self._device}
        if len(shape) == 1 and not name.endswith("bias"):
            return torch.ones(shape, **options)
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(name.encode()))
        full = torch.empty(shape, **options)
        full.normal_(0.0, 1.0 / math.sqrt(shape[-1]), generator=generator)
        return full if dim is None else full.narrow(dim, start, stop - start).clone()


def open_weights(folder: str, load_format: str, dtype: torch.dtype, device: str) -> Weights:
    return (
        DummyWeights(dtype, device) if load_format == "dummy" else SafetensorsWeights(folder, dtype, device)
    )


def _index(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the shards' index or from the files themselves."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = " (pickled weights are not loaded: convert them)" if list(folder.glob("*.bin")) else ""
        raise CheckpointError(
            f"{folder} has no *.safetensors{pickled}; --load-format dummy serves random weights"
        )
    file_of: dict[str, Path] = {}
    for path in files:
        try:
            with safe_open(str(path), framework="pt") as file:
                file_of.update(dict.fromkeys(file.keys(), path))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is no readable safetensors file: {error}") from error
    return file_of
