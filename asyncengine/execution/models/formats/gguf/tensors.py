"""Tensors of a GGUF file under transformers' names, with all that a converter did to them undone as they are read."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from asyncengine.errors import ModelNotFound, UnsupportedModel, shorten
from asyncengine.execution.layers.stored import GroupedRows, StoredMatrix, dense
from asyncengine.execution.models.formats import StoredTensor
from asyncengine.execution.models.formats.gguf import names
from asyncengine.execution.models.formats.gguf.architectures import Architecture, Moved
from asyncengine.execution.models.formats.gguf.container import GgufFile, TensorPlace
from asyncengine.execution.models.formats.gguf.header import Header
from asyncengine.execution.models.formats.gguf.names import FUSED, NAME, PARAMETERS, TensorName

MAX_PARTS = 2**20
"""Tensors after those of all experts have got names of their own."""
_IGNORED = (
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight|(v|mm|mtp)\..*"
)
"""Tensors that became part of the configuration, and parts that Ollama keeps in the same file: of images, and those
that predict further tokens."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


Held = tuple[GgufFile, TensorPlace]


@dataclass(eq=False)
class BlockMatrix:
    """A `StoredMatrix` of mapped files, unpacked when rows are asked for: that of one tensor, or of several of one type
    and width, one below the other.

    Row i is row `source[i]` of them, which may have more rows; without `source` they are the same.
    """

    parts: Sequence[Held]
    source: NDArray[np.int64] | None = None
    order: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        places = [place for _, place in self.parts]
        assert places[0].kind.form is not None
        self.name, self.form = places[0].kind.name, places[0].kind.form
        rows = sum(place.shape[0] for place in places) if self.source is None else len(self.source)
        self.shape = (rows, places[0].shape[1])

    def rows(self, first: int, last: int) -> GroupedRows:
        """Rows [first, last), unpacked into memory of their own."""
        from asyncengine.kernels.api import unpack_blocks  # numba's import is slow

        wanted = np.arange(first, last) if self.source is None else self.source[first:last]
        arrays = [file.array(place).reshape(place.shape[0], -1) for file, place in self.parts]
        stored = arrays[0]
        if len(arrays) > 1:
            stored, begin = np.empty((len(wanted), stored.shape[1]), dtype=np.uint8), 0
            for array in arrays:
                here = (wanted >= begin) & (wanted < begin + len(array))
                stored[here] = array[wanted[here] - begin]
                begin += len(array)
            wanted = np.arange(len(wanted))
        found = unpack_blocks(self.name, stored, wanted)
        scales = _exponents(found.scales) if self.name.startswith("MXFP4") else _halves(found.scales)
        minima = _halves(found.minima) if found.minima.size else None
        if minima is not None and self.name in ("Q4_1", "Q5_1"):
            minima = -minima  # these types add their minimum
        return GroupedRows(
            found.numbers, scales, found.steps if found.steps.size else None,
            minima=minima, minimum_steps=found.minimum_steps if found.minimum_steps.size else None,
        )  # fmt: skip

    def release(self, first: int, last: int) -> None:
        """Rows [first, last) will not be read again; if they lie among others in a file, those may be read again."""
        wanted, begin = np.arange(first, last) if self.source is None else self.source[first:last], 0
        for file, place in self.parts:
            own = wanted[(wanted >= begin) & (wanted < begin + place.shape[0])] - begin
            if own.size:
                row = place.nbytes // place.shape[0]
                file.release(place.offset + int(own.min()) * row, place.offset + (int(own.max()) + 1) * row)
            begin += place.shape[0]


def _halves(stored: NDArray[np.uint16]) -> NDArray[np.float32]:
    return stored.view("<f2").astype(np.float32)


def _exponents(stored: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Half of 2^(e - 127), as the table holds twice the numbers; below e = 2 that is no normal number."""
    exponents = stored.astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(0x200000) << np.minimum(exponents, 2), (exponents - 1) << 23)
    return bits.astype(np.uint32).view(np.float32)


class TensorPart(NamedTuple):
    """A tensor of the file, or some of its rows, and the changes to undo.

    `stored` is what it is in transformers' checkpoint, `added` a number that was added to weights; `decay` says that
    the file has -exp of them.
    """

    file: GgufFile
    place: TensorPlace
    stored: StoredTensor
    moved: Moved = Moved()
    added: float = 0.0
    decay: bool = False

    def read(self) -> torch.Tensor | StoredMatrix:
        """The tensor if it is plain, else the matrix as it is stored."""
        return self.plain() if self.place.kind.form is None else self.matrix()

    @property
    def flat(self) -> Held:
        """The tensor as a matrix: those of experts lie one below the other."""
        *outputs, inputs = self.place.shape
        return self.file, self.place._replace(shape=(math.prod(outputs), inputs))

    def matrix(self) -> BlockMatrix:
        """A quantized tensor."""
        return BlockMatrix([self.flat], self.moved.rows, self.moved.columns)

    def plain(self) -> torch.Tensor:
        """A tensor of plain numbers, mapped if there is nothing to undo."""
        tensor = torch.from_numpy(self.file.array(self.place)).view(_DTYPES[self.place.kind.plain or ""])
        tensor = tensor.view(self.place.shape)
        if self.moved.rows is not None:
            tensor = tensor.index_select(0, torch.from_numpy(self.moved.rows))
        if self.moved.columns is not None:
            tensor = tensor[:, torch.from_numpy(np.argsort(self.moved.columns))]
        if self.decay:
            tensor = torch.log(-tensor.float())
        tensor = tensor.reshape(self.stored.shape)
        return tensor - self.added if self.added else tensor

    def dense(self) -> torch.Tensor:
        """The numbers as float32, whatever the type."""
        return self.plain().float() if self.place.kind.form is None else dense(self.matrix()).view(self.stored.shape)


class Joined(NamedTuple):
    """A tensor of transformers' whose parts are joined as `Architecture.join` says."""

    parts: tuple[TensorPart, ...]
    join: str
    stored: StoredTensor

    def read(self) -> torch.Tensor | StoredMatrix:
        """The tensor if it is plain, else the matrix as it is stored, with outputs as rows."""
        if self.join == "latent":
            keys, values = (part.dense() for part in self.parts)
            return torch.cat((keys.transpose(1, 2), values), dim=1).reshape(self.stored.shape)
        if self.parts[0].place.kind.form is not None:
            held = [part.flat for part in self.parts]
            size = 1 if self.join == "turns" else self.parts[0].place.shape[-2]
            rows = np.arange(sum(place.shape[0] for _, place in held))
            return BlockMatrix(held, rows.reshape(len(held), -1, size).swapaxes(0, 1).reshape(-1))
        tensors = [part.plain() for part in self.parts]
        if self.join == "below":
            return torch.cat(tensors, dim=-2)
        whole = torch.stack(tensors, 2).flatten(1, 2) if len(tensors) > 1 else tensors[0]
        return whole.transpose(1, 2) if whole.ndim == 3 else whole


def model_tensors(header: Header, row: Architecture, places: dict[str, Held]) -> dict[str, TensorPart | Joined]:
    """Every tensor by its name in transformers.

    Raises `ModelNotFound` for one that the architecture has not or whose shape cannot be, `UnsupportedModel` for a type
    that is not read.
    """
    found: dict[str, TensorPart | Joined] = {}
    joined: dict[str, dict[str, TensorPart]] = {}
    layers = range(header.layers, header["block_count"])
    for whole, (file, place) in places.items():
        if re.fullmatch(_IGNORED, whole):
            continue
        split = NAME.fullmatch(whole)
        name = split and TensorName(int(split[1]) if split[1] else None, split[2], split[3] or "")
        if name is not None and name.layer in layers:  # it predicts further tokens: those of the first head may be read
            first = bool(row.head) and name.layer == header.layers
            if not first or (name.stem not in row.head and "nextn" in name.stem):
                continue
        parts = [] if name is None else _parts(header, row, name, place)
        if not parts:
            shown = shorten(whole, 100)
            raise ModelNotFound(f"{header.path} has a tensor that {header.architecture} does not have: {shown}")
        if place.kind.form is None and place.kind.plain is None:
            raise UnsupportedModel(
                f"{header.path} has the tensor {shorten(whole, 100)} as {place.kind.name}, which is not read. Pass a "
                "file quantized to Q4_K_M, Q8_0 or another k-quant or legacy type"
            )
        made: tuple[TensorName, TensorPart] | None = None
        for there, part, own, piece in parts:
            if made is None or made[0] is not own:  # all experts are alike
                try:
                    made = own, _undone(header, row, own, file, piece, joined=bool(part))
                except ValueError as error:
                    raise ModelNotFound(f"{header.path} has a wrong shape for the tensor {there}: {error}") from None
            if part:
                joined.setdefault(there, {})[part] = made[1]
            else:
                found[there] = made[1] if len(parts) == 1 else made[1]._replace(place=piece)
        if len(found) > MAX_PARTS:
            raise ModelNotFound(f"{header.path} has more than {MAX_PARTS} tensors")
    return {**{there: _joined(header, row, there, parts) for there, parts in joined.items()}, **found}


def _parts(
    header: Header, row: Architecture, name: TensorName, place: TensorPlace
) -> list[tuple[str, str, TensorName, TensorPlace]]:
    """The tensors of transformers' that a tensor of the file holds or is part of: each one's name there, its part ("",
    "#", "#0" or "#1"), the name that it would have alone in the file, and its place. Empty if the architecture has no
    such tensor."""
    if name.layer == header.layers and name.stem in row.head:
        return [(f"{row.head[name.stem]}.{name.suffix}", "", name, place)]
    table, before = (row.outer, "") if name.layer is None else (row.layer, row.prefix.format(name.layer))
    before = names.HEAD_LAYER if name.layer == header.layers else before
    stems: tuple[str, ...] = (name.stem,) if name.stem in table else row.fused.get(name.stem, ())
    if not stems or (name.layer is None and name.stem not in table):
        return []
    found = []
    places = [[place]] if name.stem in table else _unfused(header, name, place)
    for stem, own_places in zip(stems, places, strict=True):
        pieces = own_places
        own = name._replace(stem=stem)
        there, mark, part = table.get(stem, "").partition("#")
        suffix = name.suffix or ("weight" if stem.endswith("_norm") else "")  # Falcon-H1's norms have none
        if row.join == "turns" and mark and name.suffix:  # a parameter of the module of all experts
            there += "_bias" if name.suffix == "bias" else ""
        elif there.rpartition(".")[2] in PARAMETERS:
            mark = part = ""
        elif there and suffix:
            there += f".{suffix}"
        else:
            return []
        if "[]" in there and stem == name.stem:
            pieces = _along_first(header, name, place)
        elif "[]" not in there and len(pieces) > 1:
            return []
        elif there.endswith("shared_expert_gate.weight") and len(place.shape) == 1:
            pieces = [place._replace(shape=(1, *place.shape))]  # converters write a matrix of one row as a vector
        for index, piece in enumerate(pieces):
            found.append((before + there.replace("[]", str(index)), mark + part, own, piece))
    return found


def _along_first(header: Header, name: TensorName, place: TensorPlace) -> list[TensorPlace]:
    if len(place.shape) < 2 or place.shape[0] > MAX_PARTS:
        raise ModelNotFound(f"{header.path}: {name} has the shape {list(place.shape)}")
    count, size = place.shape[0], place.nbytes // place.shape[0]
    return [TensorPlace(place.kind, place.shape[1:], place.offset + index * size, size) for index in range(count)]


def _unfused(header: Header, name: TensorName, place: TensorPlace) -> list[list[TensorPlace]]:
    """For each stem that a fused one stands for: its tensor, or one for each expert."""
    if name.stem not in FUSED:
        return [[place], [place]]  # rows of both lie among each other, and `Moved` has which
    if name.stem == "attn_qkv":
        heads = header["attention.head_count"]
        dim = header.get("attention.key_length", header["embedding_length"] // max(heads, 1))
        others = header.get("attention.head_count_kv", heads) * dim
        return [[part] for part in _rows(header, name, place, (heads * dim, others, others))]
    half = place.shape[1] // 2 if len(place.shape) > 1 else 0
    pairs = [_rows(header, name, part, (half, half)) for part in _along_first(header, name, place)]
    return [[pair[index] for pair in pairs] for index in range(2)]


def _rows(header: Header, name: TensorName, place: TensorPlace, counts: Sequence[int]) -> list[TensorPlace]:
    """The places of so many rows each, one below the other."""
    if sum(counts) != place.shape[0] or 0 in counts:
        wanted = " and ".join(map(str, counts))
        raise ModelNotFound(f"{header.path}: {name} has {place.shape[0]} rows, not {wanted}")
    size, begin, found = place.nbytes // place.shape[0], place.offset, []
    for count in counts:
        found.append(TensorPlace(place.kind, (count, *place.shape[1:]), begin, count * size))
        begin += count * size
    return found


def _undone(
    header: Header, row: Architecture, name: TensorName, file: GgufFile, place: TensorPlace, *, joined: bool
) -> TensorPart:
    """The tensor with its changes. Raises `ValueError` for a shape that it cannot have."""
    kind, shape = place.kind, place.shape
    moved = (row.moved and row.moved(header, name, shape[0])) or Moved()
    rows, columns = moved.rows, moved.columns
    there = shape if rows is None else (len(rows), *shape[1:])
    fits = rows is None or (moved.total or len(rows)) == shape[0]
    if columns is not None:
        fits = fits and len(shape) == 2 and len(columns) == shape[1]
    if kind.form is not None:
        fits = fits and len(shape) in ((2, 3) if joined else (2,))
    if name.stem.startswith(("ssm_conv1d", "shortconv.conv")) and name.suffix == "weight":
        fits = fits and len(shape) > 1
        there = (math.prod(shape[:-1]), 1, shape[-1])
    elif name.stem in ("ssm_a", "ssm_d", "ssm_norm"):
        wanted = row.decay_shape if name.stem == "ssm_a" else (-1,)
        there = tuple(math.prod(shape) if size < 0 else size for size in wanted)
    if not fits:
        raise ValueError(f"its shape is {list(shape)}")
    if kind.form is not None and len(there) != len(shape):
        raise UnsupportedModel(f"{header.path} has the tensor {name} as {kind.name}, which is not read of it")
    norm = name.suffix == "weight" and name.stem.endswith("norm") and name.stem != "ssm_norm"
    stored = StoredTensor(kind.name, there, file.path)
    return TensorPart(file, place, stored, moved, row.norm_offset if norm else 0.0, name.stem == "ssm_a")


def _joined(header: Header, row: Architecture, there: str, parts: dict[str, TensorPart]) -> Joined:
    given = tuple(parts[key] for key in sorted(parts))
    first, last, count = given[0].place.shape, given[-1].place.shape, len(given)
    shape: tuple[int, ...] = ()
    if row.join == "latent":
        if len(first) == len(last) == 3 and first[:2] == (last[0], last[2]):
            shape = (first[0] * (first[2] + last[1]), first[1])
    elif first == last and len(first) == (2 if there.endswith("_bias") else 3) and row.join == "turns":
        shape = (first[0], *first[2:], first[1] * count)
    elif first == last and len(first) > 1 and row.join == "below":
        shape = (*first[:-2], first[-2] * count, first[-1])
    if not shape or parts.keys() not in ({"#"}, {"#0", "#1"}):
        shapes = " and ".join(str(list(part.place.shape)) for part in given)
        raise ModelNotFound(f"{header.path} has parts of {there} that do not go together, of the shapes {shapes}")
    kinds = sorted({part.place.kind.name for part in given})
    if len(kinds) > 1 and row.join != "latent":
        raise UnsupportedModel(f"{header.path} has parts of {there} as {' and '.join(kinds)}: of one type only")
    kind = "F32" if row.join == "latent" else kinds[0]
    return Joined(given, row.join, StoredTensor(kind, shape, given[0].file.path))
