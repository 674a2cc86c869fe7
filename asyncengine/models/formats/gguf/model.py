"""A GGUF model as a checkpoint: its configuration, and its tensors by the names that transformers gives them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.layers.stored import StoredMatrix, dense
from asyncengine.models.checkpoint import StoredTensor
from asyncengine.models.formats.gguf import joins
from asyncengine.models.formats.gguf.architecture import Architecture
from asyncengine.models.formats.gguf.config import architecture_of, header_of, hugging_face_config
from asyncengine.models.formats.gguf.container import GgufFile, Metadata, TensorPlace, broken, open_files
from asyncengine.models.formats.gguf.header import Header, shortest
from asyncengine.models.formats.gguf.matrix import BlockMatrix
from asyncengine.models.formats.gguf.names import IGNORED, split_name
from asyncengine.models.formats.gguf.parts import MAX_PARTS, parts_of
from asyncengine.models.formats.gguf.undo import Undo
from asyncengine.models.sizes import check_sizes

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


class _Entry(NamedTuple):
    """Where a tensor lies, and what its converter did to it."""

    file: GgufFile
    place: TensorPlace
    heads: int = 0
    """Its rows are those of so many heads, neighbours rotating together; 0: they lie as transformers has them."""
    added: float = 0.0
    undo: Undo | None = None
    """What else."""

    @property
    def shape(self) -> tuple[int, ...]:
        """In transformers."""
        return self.place.shape if self.undo is None else self.undo.shape_of(self.place.shape)


class GgufModel:
    """A `CheckpointSource`."""

    def __init__(self, path: Path, files: tuple[GgufFile, ...], defaults: Mapping[str, Any]) -> None:
        self.path, self.folder = path, path
        self.files = tuple(file.path for file in files)
        self.metadata: Metadata = files[0].metadata
        places = {name: (file, place) for file in files for name, place in file.tensors.items()}
        if len(places) != sum(len(file.tensors) for file in files):
            raise broken(path, "two of its parts have a tensor of the same name")
        header = header_of(path, self.metadata, {name: place for name, (_, place) in places.items()})
        factors = {name: _vector(*places[f"{name}.weight"]) for name in _FACTORS if f"{name}.weight" in places}
        self.config: dict[str, Any] = hugging_face_config(header, factors)
        _check_sizes(path, self.config, len(places))
        self._defaults: dict[str, Any] = {**_sampling(self.metadata), **defaults}
        self._entries = _entries(path, header, places)
        self._values = _values(header)
        self._joins = _joined(path, self.config["model_type"], self._entries)
        """Tensors of transformers' that are several here, or lie otherwise."""
        self.tensors = self._stored_tensors()

    def _stored_tensors(self) -> dict[str, StoredTensor]:
        inside = {part for each in self._joins.values() for part in each.parts}
        found = {
            name: StoredTensor(entry.place.kind.name, entry.shape, entry.file.path)
            for name, entry in self._entries.items()
            if name not in inside
        }
        for name, each in self._joins.items():
            first = self._entries[each.parts[0]]
            kind = "F32" if each.turned else first.place.kind.name
            found[name] = StoredTensor(kind, each.shape, first.file.path)
        values = self._values.items()
        return found | {name: StoredTensor("F32", tuple(tensor.shape), self.path) for name, tensor in values}

    @property
    def elements(self) -> int:
        return sum(stored.elements for stored in self.tensors.values())

    @property
    def weight_bytes(self) -> int:
        places = {(entry.file.path, entry.place.offset): entry.place.nbytes for entry in self._entries.values()}
        return sum(places.values())

    def generation_defaults(self) -> dict[str, Any]:
        """Of sampling, under generation_config.json's names: Ollama's first, then the file's own."""
        return dict(self._defaults)

    def stored_types(self) -> dict[str, str]:
        return {name: stored.kind for name, stored in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor | StoredMatrix:
        """A tensor under its name in transformers: mapped if nothing was done to it, or as it is stored."""
        if name in self._values:
            return self._values[name].clone()
        if (join := self._joins.get(name)) is not None:
            return self._read_joined(join)
        entry = self._entries[name]
        if entry.place.kind.form is not None:
            return _matrix(entry)
        tensor = _plain(entry)
        if entry.heads:
            tensor = tensor.index_select(0, torch.from_numpy(_source(entry)))
        if entry.undo is not None:
            tensor = entry.undo.of(tensor)
        return tensor - entry.added if entry.added else tensor

    def _read_joined(self, join: joins.Join) -> torch.Tensor | StoredMatrix:
        """Quantized ones lie one below the other, [outputs, inputs] each."""
        parts = [self._entries[part] for part in join.parts]
        if join.turned:
            return joins.plain(join, [_dense(entry) for entry in parts])
        if parts[0].place.kind.form is None:
            return joins.plain(join, [_plain(entry) for entry in parts])
        return joins.stored(join, [_matrix(_flat(entry)) for entry in parts])

    def release(self, tensor: torch.Tensor | StoredMatrix) -> None:
        """What `read` gave will not be read again. Of a copy, nothing happens."""
        if not isinstance(tensor, torch.Tensor):
            tensor.release(0, tensor.shape[0])
        else:
            for file in dict.fromkeys(entry.file for entry in self._entries.values()):
                first = tensor.data_ptr() - file.bytes.ctypes.data
                if 0 <= first < len(file.bytes) and tensor.is_contiguous():
                    file.release(first, first + tensor.nbytes)


def open_gguf(path: Path, defaults: Mapping[str, Any] = MappingProxyType({})) -> GgufModel:
    """Open a GGUF file, or any one of a model's several, and read its header. `defaults` go before the file's own.

    Raises `ModelNotFound` for what is missing or broken, `UnsupportedModel` for what is no text generator, or has an
    architecture or a type of tensors that is not read.
    """
    return GgufModel(path, open_files(path), defaults)


def _check_sizes(path: Path, config: dict[str, Any], tensors: int) -> None:
    try:
        check_sizes(config, tensors)
    except ModelNotFound as error:
        raise ModelNotFound(f"{path}: {str(error).removeprefix('config.json: ')}") from None


def _sampling(metadata: Metadata) -> dict[str, Any]:
    """What a file recommends, as far as it is numbers."""
    found = {name: metadata.single(f"general.sampling.{key}") for key, name in _SAMPLING.items()}
    return {
        name: shortest(value) if isinstance(value, float) else value
        for name, value in found.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def _entries(path: Path, header: Header, places: dict[str, tuple[GgufFile, TensorPlace]]) -> dict[str, _Entry]:
    """Every tensor under its name in transformers. Raises `ModelNotFound` for one that the architecture has not."""
    known = architecture_of(header)
    found: dict[str, _Entry] = {}
    for name, (file, place) in places.items():
        if re.fullmatch(IGNORED, name):
            continue
        own = split_name(name)
        if own is not None and own.layer is not None and header.layers <= own.layer < header.whole("block_count"):
            continue  # predicts further tokens
        parts = parts_of(header, name, known)
        if not parts:
            raise ModelNotFound(f"{path} has a tensor that {header.architecture} does not have: {shorten(name, 100)}")
        if place.kind.form is None and place.kind.plain is None:
            raise UnsupportedModel(
                f"{path} has the tensor {shorten(name, 100)} as {place.kind.name}, which is not read. Pass a file "
                "quantized to Q4_K_M, Q8_0 or another k-quant or legacy type"
            )
        for part in parts:
            undo = None if own is None else known.undo(header, own._replace(stem=part.stem))
            heads, added = _heads(part.stem, known, header), _added(name, known)
            found[part.name] = _Entry(file, part.place, heads, added, undo)
            if len(found) > MAX_PARTS:
                raise broken(path, f"it has more than {MAX_PARTS} tensors")
    for name, entry in found.items():
        _check_entry(path, name, entry)
    return found


def _values(header: Header) -> dict[str, torch.Tensor]:
    """Tensors of each layer whose numbers lie in the header."""
    known = architecture_of(header)
    return {
        known.prefix.format(layer) + there: torch.full(shape, value)
        for key, (there, shape) in known.values.items()
        for layer, value in enumerate(header.each_layer(key))
    }


def _joined(path: Path, family: str, entries: dict[str, _Entry]) -> dict[str, joins.Join]:
    try:
        found = joins.joined(family, {name: entry.place.shape for name, entry in entries.items()})
    except ValueError as error:
        raise ModelNotFound(f"{path} has experts of other shapes: {error}") from None
    for each in found.values():
        kinds = sorted({entries[part].place.kind.name for part in each.parts})
        if len(kinds) > 1 and not each.turned:
            raise UnsupportedModel(f"{path} has {' and '.join(each.parts)} as {' and '.join(kinds)}: of one type only")
    return found


def _flat(entry: _Entry) -> _Entry:
    """Of all experts' matrices, one below the other."""
    *outputs, inputs = entry.place.shape
    return entry._replace(place=entry.place._replace(shape=(math.prod(outputs), inputs)))


def _heads(stem: str, known: Architecture, header: Header) -> int:
    if not known.paired or stem not in ("attn_q", "attn_k"):
        return 0
    heads = header.whole("attention.head_count")
    return heads if stem == "attn_q" else header.whole("attention.head_count_kv", heads, zeros=known.hybrid)


def _added(name: str, known: Architecture) -> float:
    return known.norm_offset if name.endswith("norm.weight") and not name.endswith("ssm_norm.weight") else 0.0


def _check_entry(path: Path, name: str, entry: _Entry) -> None:
    rows = entry.place.shape[0]
    if entry.heads and rows % (2 * entry.heads):
        raise ModelNotFound(f"{path} has a wrong shape for the tensor {name}: {rows} rows for {entry.heads} heads")
    try:
        _ = entry.shape
    except ValueError as error:
        raise ModelNotFound(f"{path} has a wrong shape for the tensor {name}: {error}") from None
    if entry.undo is not None and entry.place.kind.form is not None and (entry.undo.decay or entry.undo.shape):
        raise UnsupportedModel(f"{path} has the tensor {name} as {entry.place.kind.name}, which is not read of it")
    whole = 3 if name.endswith(joins.MATRICES) else 2
    if entry.place.kind.form is not None and len(entry.place.shape) != whole:
        raise ModelNotFound(f"{path} has a wrong shape for the tensor {name}: {list(entry.place.shape)}")


def _source(entry: _Entry) -> NDArray[np.int64]:
    """Row i of transformers' tensor is row source[i] of the file: of each head, even rows first, then odd ones."""
    rows = entry.place.shape[0]
    return np.arange(rows, dtype=np.int64).reshape(entry.heads, -1, 2).swapaxes(1, 2).reshape(rows)


def _matrix(entry: _Entry) -> BlockMatrix:
    place, form = entry.place, entry.place.kind.form
    assert form is not None
    source = _source(entry) if entry.heads else entry.undo.rows if entry.undo else None
    shape = (place.shape[0] if source is None else len(source), place.shape[1])
    return BlockMatrix(
        place.kind.name, shape, form, entry.file, place, source, entry.undo.columns if entry.undo else None
    )


def _dense(entry: _Entry) -> torch.Tensor:
    """Float32, of whatever type it is in the file."""
    if entry.place.kind.form is None:
        return _plain(entry).float()
    return dense(_matrix(_flat(entry))).view(entry.place.shape)


def _plain(entry: _Entry) -> torch.Tensor:
    array = torch.from_numpy(entry.file.array(entry.place))
    dtype = _DTYPES[entry.place.kind.plain or ""]
    return array.view(dtype).view(entry.place.shape)


def _vector(file: GgufFile, place: TensorPlace) -> NDArray[np.float32]:
    if place.kind.plain != "F32" or len(place.shape) != 1:
        raise broken(file.path, "its rotary factors are no vector of float32")
    return file.array(place).view("<f4")
