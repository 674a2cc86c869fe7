"""Tensors of a file that are several in transformers: experts, norms of single heads, and what a converter fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncengine.errors import ModelNotFound
from asyncengine.models.formats.gguf.architecture import Architecture
from asyncengine.models.formats.gguf.container import TensorPlace
from asyncengine.models.formats.gguf.header import Header
from asyncengine.models.formats.gguf.names import FUSED, TensorName, hugging_face_name, split_name

MAX_PARTS = 2**20
"""Tensors after those of all experts have got names of their own."""


class Part(NamedTuple):
    """A tensor of transformers' in a file."""

    name: str
    """In transformers."""
    stem: str
    """In the file, if it lay alone there: "attn_q"."""
    place: TensorPlace


def parts_of(header: Header, name: str, architecture: Architecture) -> list[Part]:
    """What one tensor of the file is in transformers; nothing if its architecture has no such tensor.

    Raises `ModelNotFound` for a shape that cannot be taken apart.
    """
    known, place = split_name(name), header.tensors[name]
    if known is None:
        return []
    tables = architecture.layer, architecture.outer, architecture.prefix
    there = hugging_face_name(known, *tables)
    if there is not None:
        return [Part(own, known.stem, part) for own, part in _single(header, there, place)]
    if known.layer is None or known.stem not in architecture.fused:
        return []
    found = []
    for stem, piece in zip(architecture.fused[known.stem], _unfused(header, known, place), strict=True):
        there = hugging_face_name(known._replace(stem=stem), *tables)
        if there is None:
            return []
        found += [Part(there.format(index), stem, part) for index, part in enumerate(piece)]
    return found


def _single(header: Header, there: str, place: TensorPlace) -> list[tuple[str, TensorPlace]]:
    """A tensor, or those along its first axis."""
    if "{}" in there:
        return [(there.format(index), part) for index, part in enumerate(_along_first(header, there, place))]
    if there.endswith("shared_expert_gate.weight") and len(place.shape) == 1:
        place = place._replace(shape=(1, *place.shape))
    return [(there, place)]


def _along_first(header: Header, name: str, place: TensorPlace) -> list[TensorPlace]:
    if len(place.shape) < 2 or place.shape[0] > MAX_PARTS:
        raise ModelNotFound(f"{header.path}: {name} has the shape {list(place.shape)}")
    count, size = place.shape[0], place.nbytes // place.shape[0]
    return [TensorPlace(place.kind, place.shape[1:], place.offset + index * size, size) for index in range(count)]


def _unfused(header: Header, name: TensorName, place: TensorPlace) -> list[list[TensorPlace]]:
    """For each name that it stands for: the tensor, or one for each expert."""
    if name.stem not in FUSED:
        return [[place], [place]]  # rows of both take turns, and `Undo` has which
    if name.stem == "attn_qkv":
        heads = header.whole("attention.head_count")
        dim = header.whole("attention.key_length", header.whole("embedding_length") // max(heads, 1))
        others = header.whole("attention.head_count_kv", heads, zeros=True) * dim
        return [[part] for part in _rows(header, name, place, (heads * dim, others, others))]
    half = place.shape[1] // 2 if len(place.shape) > 1 else 0
    pairs = [_rows(header, name, part, (half, half)) for part in _along_first(header, name.whole, place)]
    return [[pair[index] for pair in pairs] for index in range(2)]


def _rows(header: Header, name: TensorName, place: TensorPlace, counts: Sequence[int]) -> list[TensorPlace]:
    """So many rows each, one below the other."""
    if sum(counts) != place.shape[0] or 0 in counts:
        raise ModelNotFound(
            f"{header.path}: {name.whole} has {place.shape[0]} rows, not {' and '.join(map(str, counts))}"
        )
    size, begin, found = place.nbytes // place.shape[0], place.offset, []
    for count in counts:
        found.append(TensorPlace(place.kind, (count, *place.shape[1:]), begin, count * size))
        begin += count * size
    return found
