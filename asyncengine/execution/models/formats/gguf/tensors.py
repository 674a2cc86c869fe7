"""Tensors of a GGUF file under transformers' names; a converter's changes are undone as they are read."""

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
from asyncengine.execution.models.formats.gguf.container import GgufFile, TensorInfo
from asyncengine.execution.models.formats.gguf.header import Header
from asyncengine.execution.models.formats.gguf.names import FUSED, NAME, PARAMETERS, TensorName

MAX_SPLIT_TENSORS = 2**20
"""Most tensors of a model once those of all experts have been split into a tensor for each expert."""
_IGNORED = (
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.(attn_rot_embd|rope_freqs)\.weight|(v|mm|mtp)\..*"
)
"""Tensors that are not weights: rotary factors, which go into the configuration, and the vision tower and multi-token
prediction head that Ollama keeps in the same file."""
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


Mapped = tuple[GgufFile, TensorInfo]


@dataclass(eq=False)
class BlockMatrix:
    """A `StoredMatrix` over mapped files that unpacks rows on demand. Its `segments` are one or more tensors of one
    type and width, concatenated along the rows.

    Row i of the matrix is row `source[i]` of the segments, which may have more rows; None: they are the same rows.
    """

    segments: Sequence[Mapped]
    source: NDArray[np.int64] | None = None
    order: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        infos = [info for _, info in self.segments]
        assert infos[0].type.form is not None
        self.name, self.form = infos[0].type.name, infos[0].type.form
        rows = sum(info.shape[0] for info in infos) if self.source is None else len(self.source)
        self.shape = (rows, infos[0].shape[1])

    def rows(self, first: int, last: int) -> GroupedRows:
        """Rows [first, last), unpacked into memory of their own."""
        from asyncengine.kernels.api import unpack_blocks  # numba's import is slow

        wanted = np.arange(first, last) if self.source is None else self.source[first:last]
        arrays = [file.array(info).reshape(info.shape[0], -1) for file, info in self.segments]
        stored = arrays[0]
        if len(arrays) > 1:
            stored, begin = np.empty((len(wanted), stored.shape[1]), dtype=np.uint8), 0
            for array in arrays:
                in_segment = (wanted >= begin) & (wanted < begin + len(array))
                stored[in_segment] = array[wanted[in_segment] - begin]
                begin += len(array)
            wanted = np.arange(len(wanted))
        blocks = unpack_blocks(self.name, stored, wanted)
        scales = _exponents(blocks.scales) if self.name.startswith("MXFP4") else _halves(blocks.scales)
        minima = _halves(blocks.minima) if blocks.minima.size else None
        if minima is not None and self.name in ("Q4_1", "Q5_1"):
            minima = -minima  # these types add their minimum
        return GroupedRows(
            blocks.numbers, scales, blocks.steps if blocks.steps.size else None,
            minima=minima, minimum_steps=blocks.minimum_steps if blocks.minimum_steps.size else None,
        )  # fmt: skip

    def release(self, first: int, last: int) -> None:
        """Let the system reclaim the pages of rows [first, last). Rows between them in the file can still be read."""
        wanted, begin = np.arange(first, last) if self.source is None else self.source[first:last], 0
        for file, info in self.segments:
            released = wanted[(wanted >= begin) & (wanted < begin + info.shape[0])] - begin
            if released.size:
                row = info.nbytes // info.shape[0]
                file.release(info.offset + int(released.min()) * row, info.offset + (int(released.max()) + 1) * row)
            begin += info.shape[0]


def _halves(stored: NDArray[np.uint16]) -> NDArray[np.float32]:
    return stored.view("<f2").astype(np.float32)


def _exponents(stored: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Half of 2^(e - 127), as the table holds twice the numbers; below e = 2 the result is a subnormal float."""
    exponents = stored.astype(np.uint32)
    bits = np.where(exponents < 2, np.uint32(0x200000) << np.minimum(exponents, 2), (exponents - 1) << 23)
    return bits.astype(np.uint32).view(np.float32)


class FileTensor(NamedTuple):
    """A tensor of the file, or some of its rows, and the converter's changes to undo.

    `stored` is its header in transformers' checkpoint, `added` a number that the converter added to weights; `decay`:
    the file holds -exp(weight).
    """

    file: GgufFile
    info: TensorInfo
    stored: StoredTensor
    moved: Moved = Moved()
    added: float = 0.0
    decay: bool = False

    def read(self) -> torch.Tensor | StoredMatrix:
        """The tensor if it is not quantized, else the matrix in its stored form."""
        return self.plain() if self.info.type.form is None else self.matrix()

    @property
    def flat(self) -> Mapped:
        """The tensor as a matrix; experts' matrices are concatenated along the rows."""
        *outputs, inputs = self.info.shape
        return self.file, self.info._replace(shape=(math.prod(outputs), inputs))

    def matrix(self) -> BlockMatrix:
        """A quantized tensor."""
        return BlockMatrix([self.flat], self.moved.rows, self.moved.columns)

    def plain(self) -> torch.Tensor:
        """An unquantized tensor; it stays memory-mapped if there is nothing to undo."""
        tensor = torch.from_numpy(self.file.array(self.info)).view(_DTYPES[self.info.type.plain or ""])
        tensor = tensor.view(self.info.shape)
        if self.moved.rows is not None:
            tensor = tensor.index_select(0, torch.from_numpy(self.moved.rows))
        if self.moved.columns is not None:
            tensor = tensor[:, torch.from_numpy(np.argsort(self.moved.columns))]
        if self.decay:
            tensor = torch.log(-tensor.float())
        tensor = tensor.reshape(self.stored.shape)
        return tensor - self.added if self.added else tensor

    def dense(self) -> torch.Tensor:
        """The tensor in float32, dequantized if need be."""
        return self.plain().float() if self.info.type.form is None else dense(self.matrix()).view(self.stored.shape)


class Joined(NamedTuple):
    """A tensor of transformers that joins tensors of the file as `Architecture.join` says."""

    sources: tuple[FileTensor, ...]
    join: str
    stored: StoredTensor

    def read(self) -> torch.Tensor | StoredMatrix:
        """The tensor if it is not quantized, else the matrix in its stored form, with outputs as rows."""
        if self.join == "latent":
            keys, values = (source.dense() for source in self.sources)
            return torch.cat((keys.transpose(1, 2), values), dim=1).reshape(self.stored.shape)
        if self.sources[0].info.type.form is not None:
            segments = [source.flat for source in self.sources]
            size = 1 if self.join == "turns" else self.sources[0].info.shape[-2]
            rows = np.arange(sum(info.shape[0] for _, info in segments))
            return BlockMatrix(segments, rows.reshape(len(segments), -1, size).swapaxes(0, 1).reshape(-1))
        tensors = [source.plain() for source in self.sources]
        if self.join == "below":
            return torch.cat(tensors, dim=-2)
        whole = torch.stack(tensors, 2).flatten(1, 2) if len(tensors) > 1 else tensors[0]
        return whole.transpose(1, 2) if whole.ndim == 3 else whole


def model_tensors(header: Header, row: Architecture, mapped: dict[str, Mapped]) -> dict[str, FileTensor | Joined]:
    """All tensors by their names in transformers.

    Raises `ModelNotFound` for a tensor that the architecture does not have or whose shape is impossible,
    `UnsupportedModel` for a type that is not read.
    """
    tensors: dict[str, FileTensor | Joined] = {}
    joins: dict[str, dict[str, FileTensor]] = {}
    layers = range(header.layers, header["block_count"])
    for name_in_file, (file, info) in mapped.items():
        if re.fullmatch(_IGNORED, name_in_file):
            continue
        split = NAME.fullmatch(name_in_file)
        name = split and TensorName(int(split[1]) if split[1] else None, split[2], split[3] or "")
        if name is not None and name.layer in layers:  # a multi-token prediction head, of which the first may be read
            first = bool(row.head) and name.layer == header.layers
            if not first or (name.stem not in row.head and "nextn" in name.stem):
                continue
        targets = [] if name is None else _targets_of(header, row, name, info)
        if not targets:
            shown = shorten(name_in_file, 100)
            raise ModelNotFound(f"{header.path} has a tensor that {header.architecture} does not have: {shown}")
        if info.type.form is None and info.type.plain is None:
            raise UnsupportedModel(
                f"{header.path} has the tensor {shorten(name_in_file, 100)} as {info.type.name}, which is not read. "
                "Pass a file quantized to Q4_K_M, Q8_0 or another k-quant or legacy type"
            )
        last: tuple[TensorName, FileTensor] | None = None
        for target, role, own_name, piece_info in targets:
            if last is None or last[0] is not own_name:  # once for all experts, which differ by their bytes alone
                try:
                    last = own_name, _undone(header, row, own_name, file, piece_info, joined=bool(role))
                except ValueError as error:
                    raise ModelNotFound(f"{header.path} has a wrong shape for the tensor {target}: {error}") from None
            if role:
                joins.setdefault(target, {})[role] = last[1]
            else:
                tensors[target] = last[1] if len(targets) == 1 else last[1]._replace(info=piece_info)
        if len(tensors) > MAX_SPLIT_TENSORS:
            raise ModelNotFound(f"{header.path} has more than {MAX_SPLIT_TENSORS} tensors")
    return {**{target: _joined(header, row, target, targets) for target, targets in joins.items()}, **tensors}


def _targets_of(
    header: Header, row: Architecture, name: TensorName, info: TensorInfo
) -> list[tuple[str, str, TensorName, TensorInfo]]:
    """The tensors of transformers that a tensor of the file contains, or is joined into: for each, its name there, the
    role in a join ("#", "#0" or "#1", else ""), the name that it would have alone in the file, and its bytes. Empty if
    the architecture has no such tensor."""
    if name.layer == header.layers and name.stem in row.head:
        return [(f"{row.head[name.stem]}.{name.suffix}", "", name, info)]
    table, before = (row.outer, "") if name.layer is None else (row.layer, row.prefix.format(name.layer))
    before = names.HEAD_LAYER if name.layer == header.layers else before
    stems: tuple[str, ...] = (name.stem,) if name.stem in table else row.fused.get(name.stem, ())
    if not stems or (name.layer is None and name.stem not in table):
        return []
    targets = []
    pieces_by_stem = [[info]] if name.stem in table else _unfused(header, name, info)
    for stem, stem_pieces in zip(stems, pieces_by_stem, strict=True):
        pieces = stem_pieces
        stem_name = name._replace(stem=stem)
        target, mark, role = table.get(stem, "").partition("#")
        suffix = name.suffix or ("weight" if stem.endswith("_norm") else "")  # Falcon-H1's norms have none
        if row.join == "turns" and mark and name.suffix:  # a parameter of the module of all experts
            target += "_bias" if name.suffix == "bias" else ""
        elif target.rpartition(".")[2] in PARAMETERS:
            mark = role = ""
        elif target and suffix:
            target += f".{suffix}"
        else:
            return []
        if "[]" in target and stem == name.stem:
            pieces = _along_first(header, name, info)
        elif "[]" not in target and len(pieces) > 1:
            return []
        elif target.endswith("shared_expert_gate.weight") and len(info.shape) == 1:
            pieces = [info._replace(shape=(1, *info.shape))]  # converters write a matrix of one row as a vector
        for index, piece in enumerate(pieces):
            targets.append((before + target.replace("[]", str(index)), mark + role, stem_name, piece))
    return targets


def _along_first(header: Header, name: TensorName, info: TensorInfo) -> list[TensorInfo]:
    if len(info.shape) < 2 or info.shape[0] > MAX_SPLIT_TENSORS:
        raise ModelNotFound(f"{header.path}: {name} has the shape {list(info.shape)}")
    count, size = info.shape[0], info.nbytes // info.shape[0]
    return [TensorInfo(info.type, info.shape[1:], info.offset + index * size, size) for index in range(count)]


def _unfused(header: Header, name: TensorName, info: TensorInfo) -> list[list[TensorInfo]]:
    """For each stem of a fused tensor: the bytes of its tensor, or of one for each expert."""
    if name.stem not in FUSED:
        return [[info], [info]]  # rows of both are interleaved, and `Moved` says which are whose
    if name.stem == "attn_qkv":
        heads = header["attention.head_count"]
        dim = header.get("attention.key_length", header["embedding_length"] // max(heads, 1))
        others = header.get("attention.head_count_kv", heads) * dim
        return [[rows] for rows in _rows(header, name, info, (heads * dim, others, others))]
    half = info.shape[1] // 2 if len(info.shape) > 1 else 0
    pairs = [_rows(header, name, rows, (half, half)) for rows in _along_first(header, name, info)]
    return [[pair[index] for pair in pairs] for index in range(2)]


def _rows(header: Header, name: TensorName, info: TensorInfo, counts: Sequence[int]) -> list[TensorInfo]:
    """Split a tensor along its rows into tensors of `counts` rows. Raises `ModelNotFound` if these do not add up."""
    if sum(counts) != info.shape[0] or 0 in counts:
        expected = " and ".join(map(str, counts))
        raise ModelNotFound(f"{header.path}: {name} has {info.shape[0]} rows, not {expected}")
    size, begin, infos = info.nbytes // info.shape[0], info.offset, []
    for count in counts:
        infos.append(TensorInfo(info.type, (count, *info.shape[1:]), begin, count * size))
        begin += count * size
    return infos


def _undone(
    header: Header, row: Architecture, name: TensorName, file: GgufFile, info: TensorInfo, *, joined: bool
) -> FileTensor:
    """The tensor with the changes to undo. Raises `ValueError` for an impossible shape."""
    block_type, shape = info.type, info.shape
    moved = (row.moved and row.moved(header, name, shape[0])) or Moved()
    rows, columns = moved.rows, moved.columns
    stored_shape = shape if rows is None else (len(rows), *shape[1:])
    fits = rows is None or (moved.total or len(rows)) == shape[0]
    if columns is not None:
        fits = fits and len(shape) == 2 and len(columns) == shape[1]
    if block_type.form is not None:
        fits = fits and len(shape) in ((2, 3) if joined else (2,))
    if name.stem.startswith(("ssm_conv1d", "shortconv.conv")) and name.suffix == "weight":
        fits = fits and len(shape) > 1
        stored_shape = (math.prod(shape[:-1]), 1, shape[-1])
    elif name.stem in ("ssm_a", "ssm_d", "ssm_norm"):
        wanted = row.decay_shape if name.stem == "ssm_a" else (-1,)
        stored_shape = tuple(math.prod(shape) if size < 0 else size for size in wanted)
    if not fits:
        raise ValueError(f"its shape is {list(shape)}")
    if block_type.form is not None and len(stored_shape) != len(shape):
        raise UnsupportedModel(f"{header.path} has the tensor {name} as {block_type.name}, which is not read of it")
    norm = name.suffix == "weight" and name.stem.endswith("norm") and name.stem != "ssm_norm"
    stored = StoredTensor(block_type.name, stored_shape, file.path)
    return FileTensor(file, info, stored, moved, row.norm_offset if norm else 0.0, name.stem == "ssm_a")


def _joined(header: Header, row: Architecture, target: str, by_role: dict[str, FileTensor]) -> Joined:
    sources = tuple(by_role[key] for key in sorted(by_role))
    first, last, count = sources[0].info.shape, sources[-1].info.shape, len(sources)
    shape: tuple[int, ...] = ()
    if row.join == "latent":
        if len(first) == len(last) == 3 and first[:2] == (last[0], last[2]):
            shape = (first[0] * (first[2] + last[1]), first[1])
    elif first == last and len(first) == (2 if target.endswith("_bias") else 3) and row.join == "turns":
        shape = (first[0], *first[2:], first[1] * count)
    elif first == last and len(first) > 1 and row.join == "below":
        shape = (*first[:-2], first[-2] * count, first[-1])
    if not shape or by_role.keys() not in ({"#"}, {"#0", "#1"}):
        shapes = " and ".join(str(list(source.info.shape)) for source in sources)
        raise ModelNotFound(f"{header.path} has parts of {target} that do not go together, of the shapes {shapes}")
    block_types = sorted({source.info.type.name for source in sources})
    if len(block_types) > 1 and row.join != "latent":
        raise UnsupportedModel(f"{header.path} has parts of {target} as {' and '.join(block_types)}: of one type only")
    dtype = "F32" if row.join == "latent" else block_types[0]
    return Joined(sources, row.join, StoredTensor(dtype, shape, sources[0].file.path))
