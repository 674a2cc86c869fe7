"""Reads a PEFT checkpoint into an `Adapter`, or says exactly why not.

Everything is checked against the base model before a weight is read: names, ranks, shapes, bytes. The identity of an
adapter is a digest over what it does (module, scaling, weights as stored), so that the same content has one identity
under any name, in any folder, with any irrelevant setting, and one changed weight gives another. What is kept is what a
device slot takes: the model's dtype, scaling folded in.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncengine.errors import AdapterError
from asyncengine.lora.adapter import Adapter, LoraWeights
from asyncengine.lora.checkpoint.files import CONFIG_FILE, WEIGHTS_FILE, find_folder, open_file, read_config
from asyncengine.lora.checkpoint.peft_config import PeftConfig, read_peft_config
from asyncengine.seams import ModuleDims

# A safetensors file of any origin: nothing it says is believed before it is checked.

MAX_HEADER_BYTES = 8 << 20
"""Adapters of the largest models have some thousand tensors, about 150 bytes of header each."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


_PIECE = 1 << 14
"""Numbers that torch works on with one thread."""


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`tensor`, contiguous, as flat views so small that work on them stays on the calling thread: workers that read
    files must not take a running step's cores, whose threads all wait for the last one."""
    return torch.split(tensor.view(-1), _PIECE)


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raises `AdapterError` for a tensor, contiguous, with NaN or an infinity."""
    if not all(bool(torch.isfinite(piece).all()) for piece in pieces(tensor)):
        raise AdapterError(name, "holds values that are not finite (NaN or infinity)")


class Extent(NamedTuple):
    """The extent of one tensor, counted from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def parse_json(text: bytes, field: str) -> dict[str, Any]:
    """A JSON object without NaN and without a key twice (which of the two would count?). Raises `AdapterError`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"the key {key[:80]!r} is there twice")
            found[key] = value
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not JSON")

    try:
        content = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise AdapterError(field, f"cannot be read as JSON: {reason}") from None
    if not isinstance(content, dict):
        raise AdapterError(field, "must hold a JSON object")
    return content


class TensorFile:
    """An open safetensors file with a checked header."""

    def __init__(self, stream: BufferedReader, field: str) -> None:
        """`stream` at its beginning; the caller closes it. Raises `AdapterError`."""
        self._stream = stream
        self.field = field
        self._opened = _state(stream)
        size = self._opened[0]
        length = int.from_bytes(stream.read(8), "little") if size >= 8 else 0
        if not 2 <= length <= size - 8:
            raise AdapterError(field, "is not a whole safetensors file: its header is cut off")
        if length > MAX_HEADER_BYTES:
            raise AdapterError(field, f"has a header of {length} bytes, over the limit of {MAX_HEADER_BYTES}")
        header = parse_json(stream.read(length), field)
        header.pop("__metadata__", None)
        self._data = 8 + length
        self.tensors = {name: self._extent(name, entry) for name, entry in header.items()}
        self._check_layout(size - self._data)

    def _extent(self, name: str, entry: Any) -> Extent:
        try:
            dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise AdapterError(self.field, f"has no dtype, shape and data_offsets for {name[:80]!r}") from None
        if not isinstance(dtype, str) or any(type(n) is not int or n < 0 for n in (*shape, start, end)):
            raise AdapterError(self.field, f"has a malformed entry for {name[:80]!r}")
        return Extent(dtype, shape, start, end)

    def _check_layout(self, size: int) -> None:
        end = 0
        for name, extent in sorted(self.tensors.items(), key=lambda item: (item[1].start, item[1].end)):
            if extent.start != end or extent.end < end:
                raise AdapterError(self.field, f"has a gap or an overlap before {name[:80]!r}")
            end = extent.end
        if end != size:
            raise AdapterError(
                self.field, f"is truncated or has bytes left over: {size} of data, its header describes {end}"
            )

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own. Raises `AdapterError` for a dtype that is not a usual float, wrong
        extents, or a value that is not finite."""
        extent = self.tensors[name]
        dtype = DTYPES.get(extent.dtype)
        if dtype is None:
            raise AdapterError(name, "must be float32, float16 or bfloat16", extent.dtype)
        if math.prod(extent.shape) * dtype.itemsize != extent.end - extent.start or not math.prod(extent.shape):
            raise AdapterError(name, f"has {extent.end - extent.start} bytes, which is not its shape", extent.shape)
        content = bytearray(extent.end - extent.start)
        self._stream.seek(self._data + extent.start)
        if self._stream.readinto(content) != len(content):
            raise AdapterError(self.field, "was cut off while it was read")
        tensor = torch.frombuffer(content, dtype=dtype).reshape(extent.shape)
        check_finite(name, tensor)
        return tensor

    def check_unchanged(self) -> None:
        """Raises `AdapterError` if the file was written to since it was opened: half old, half new is neither."""
        if _state(self._stream) != self._opened:
            raise AdapterError(self.field, "changed while it was read; load it again when it is complete")


def _state(stream: BufferedReader) -> tuple[int, int]:
    """Its size, and when it was written to last."""
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


class AdapterTensors:
    """Tensors by PEFT's names, as `TensorFile` has them. They stay the caller's."""

    field = "tensors"

    def __init__(self, given: Any) -> None:
        """Raises `AdapterError` for anything but whole float tensors by name."""
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise AdapterError("tensors", "must map PEFT's names to tensors", type(given).__name__)
        self._given: dict[str, torch.Tensor] = dict(given)
        self.tensors: dict[str, Extent] = {}
        dtypes = {dtype: name for name, dtype in DTYPES.items()}
        for name, tensor in self._given.items():
            kind = type(tensor)
            whole = kind in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
            if not whole or tensor.is_meta or not tensor.numel():
                raise AdapterError(name[:256], "must be a whole tensor with values", kind.__name__)
            if tensor.dtype not in dtypes:
                raise AdapterError(name[:256], "must be float32, float16 or bfloat16", str(tensor.dtype))
            self.tensors[name] = Extent(dtypes[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the host, contiguous. Raises `AdapterError` for a value that is not finite."""
        tensor = self._given[name].detach().cpu().contiguous()
        check_finite(name, tensor)
        return tensor


def given_config(config: Any) -> dict[str, Any]:
    """An adapter's configuration as its file would have it: a mapping, or PEFT's object with `to_dict`.

    Raises `AdapterError` for what JSON cannot hold.
    """
    found = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(found, Mapping):
        raise AdapterError("config", "must be a mapping, as in adapter_config.json, or a LoraConfig", config)
    try:
        text = json.dumps(dict(found), default=_listed)
    except (TypeError, ValueError, RecursionError) as error:
        raise AdapterError("config", f"cannot be written as JSON: {error}") from None
    return parse_json(text.encode(), "config")


def _listed(value: Any) -> Any:
    """PEFT keeps names of modules in sets."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(?P<weight>\.weight)?")
_FOREIGN = {
    ".lora_magnitude_vector": ("use_dora", "the file holds DoRA magnitudes"),
    ".token_adapter.": ("trainable_token_indices", "the file holds trained tokens"),
    ".trainable_tokens_": ("trainable_token_indices", "the file holds trained tokens"),
    ".lora_B.bias": ("lora_bias", "the file holds a bias of the adapter"),
    ".bias": ("bias", "the file holds biases"),
}
MAX_NAME_CHARS = 256


@dataclass(frozen=True, slots=True)
class _Pair:
    """The two tensors of one module, by name."""

    a: str
    b: str
    embedding: bool
    rank: int


class PeftLoader:
    """Loads adapters for one base model. Immutable: any number of threads may load at once."""

    def __init__(
        self,
        base: Mapping[str, ModuleDims],
        *,
        dtype: torch.dtype,
        max_rank: int,
        root: str | os.PathLike[str] | None = None,
    ) -> None:
        """`base`: the modules that can take an adapter, by Hugging Face path. `dtype`: the model's. `root`: adapters
        lie inside this folder or are refused; None: anywhere."""
        self._base = dict(base)
        self._dtype = dtype
        self._max_rank = max_rank
        self.root = None if root is None else Path(root).expanduser().resolve()

    def fingerprint(self, path: str | os.PathLike[str], max_bytes: int) -> Hashable:
        """The folder and the state of its files: what changes when they change. Reads no weights.

        Raises `AdapterError`, also for an adapter that would take more than `max_bytes` of memory.
        """
        folder = find_folder(path, self.root)
        states = []
        need = 0
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            with open_file(folder, file, self.root) as stream:
                status = os.fstat(stream.fileno())
                if file == WEIGHTS_FILE:
                    need = self._held_bytes(TensorFile(stream, file))
            states.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        if need > max_bytes:
            raise AdapterError("adapter_memory", f"is {max_bytes} bytes, and the adapter needs {need}", str(folder))
        return (folder, *states)

    def _held_bytes(self, file: TensorFile | AdapterTensors) -> int:
        """Memory of the adapter's own tensors in the model's dtype."""
        numbers = sum(math.prod(extent.shape) for name, extent in file.tensors.items() if _NAME.fullmatch(name))
        return numbers * self._dtype.itemsize

    def load(self, name: str, path: str | os.PathLike[str]) -> Adapter:
        """Blocking: reads the files. Raises `AdapterError`; nothing is left behind then."""
        folder = find_folder(path, self.root)
        config = read_peft_config(parse_json(read_config(folder, self.root), CONFIG_FILE))
        with open_file(folder, WEIGHTS_FILE, self.root) as stream:
            try:
                file = TensorFile(stream, WEIGHTS_FILE)
                adapter = self._load(name, config, file)
                file.check_unchanged()
            except OSError as error:
                raise AdapterError(WEIGHTS_FILE, f"cannot be read ({type(error).__name__})") from None
        return adapter

    def take(self, name: str, tensors: Any, config: Any) -> Adapter:
        """The adapter of tensors by PEFT's names and the configuration that belongs to them. Raises `AdapterError`."""
        return self._load(name, read_peft_config(given_config(config)), AdapterTensors(tensors))

    def _load(self, name: str, config: PeftConfig, file: TensorFile | AdapterTensors) -> Adapter:
        pairs, digest = self._pair(config, file), hashlib.sha256(b"asyncengine.lora 1\n")
        modules = {module: self._read(config, file, module, pair, digest) for module, pair in sorted(pairs.items())}
        rank = max(weights.rank for weights in modules.values())
        nbytes, invocation = sum(own.nbytes for own in modules.values()), tuple(config.alora_invocation_tokens)
        if invocation:
            digest.update(f"{invocation}\n".encode())
        return Adapter(name, digest.hexdigest(), rank, modules, nbytes, invocation)

    # ---------------------------------------------------------------- names and shapes

    def _pair(self, config: PeftConfig, file: TensorFile | AdapterTensors) -> dict[str, _Pair]:
        """Module -> its two tensors, after checking that the file holds what the configuration says and nothing else,
        and that all of it fits the base model."""
        sides: dict[str, dict[str, str]] = {}
        for name in sorted(file.tensors):
            module, side = self._parse(config, file, name)
            if side:
                sides.setdefault(module, {})[side] = name
        if not sides:
            raise AdapterError(file.field, "holds no adapter weights")
        if not config.all_linear:
            for module, base in self._base.items():
                if module not in sides and config.targets(module, base):
                    raise AdapterError("target_modules", f"names {module}, but the file has no weights for it")
        return {module: self._check_pair(config, file, module, names) for module, names in sides.items()}

    def _parse(self, config: PeftConfig, file: TensorFile | AdapterTensors, name: str) -> tuple[str, str]:
        """(module, "A" or "B"), or ("", "") for a tensor that is only a copy of the base model's."""
        for part, (field, reason) in _FOREIGN.items():
            if part in name if part.endswith((".", "_")) else name.endswith(part):
                raise AdapterError(field, f"{reason}, which is not supported", name)
        path = name.removeprefix(_PREFIX)
        copied = self._base.get(path.removesuffix(".weight").removesuffix(".base_layer"))
        if copied is not None and path.endswith(".weight"):
            # PEFT saves the table of a targeted embedding or lm_head along; it was frozen, so it is the base model's
            # unless it was resized.
            table = (copied.inputs, copied.outputs) if copied.kind == "embedding" else (copied.outputs, copied.inputs)
            if not path.endswith(".base_layer.weight") or file.tensors[name].shape != table:
                raise AdapterError("modules_to_save", "the file holds a base weight of its own; not supported", name)
            return "", ""
        found = _NAME.fullmatch(path)
        if found is None or path == name or len(name) > 4 * MAX_NAME_CHARS:
            raise AdapterError(name[:MAX_NAME_CHARS], "is not a LoRA tensor as PEFT names them")
        if bool(found["embedding"]) == bool(found["weight"]):
            raise AdapterError(name[:MAX_NAME_CHARS], "is not a LoRA tensor as PEFT names them")
        module = found["module"]
        base = self._base.get(module)
        if base is None:
            raise AdapterError(
                name, f"the base model has no {module} that takes an adapter (made for {config.base_name})"
            )
        if bool(found["embedding"]) != (base.kind == "embedding"):
            raise AdapterError(
                name, f"does not fit: {module} is {'an' if base.kind == 'embedding' else 'no'} embedding"
            )
        return module, found["side"]

    def _check_pair(
        self, config: PeftConfig, file: TensorFile | AdapterTensors, module: str, names: dict[str, str]
    ) -> _Pair:
        base = self._base[module]
        if len(names) != 2:
            lacking = "B" if "A" in names else "A"
            raise AdapterError(next(iter(names.values())), f"comes without its lora_{lacking}")
        if not config.targets(module, base):
            raise AdapterError("target_modules", f"does not name {module}, but the file has weights for it")
        if config.alora_invocation_tokens and base.kind == "embedding":
            raise AdapterError("alora_invocation_tokens", f"is for linears; {module} is an embedding")
        if config.fan_in_fan_out and base.kind == "linear":
            raise AdapterError("fan_in_fan_out", f"is for Conv1D modules; {module} is a plain linear")
        rank, field = config.rank_of(module)
        if rank > self._max_rank:
            raise AdapterError(field, f"is over max_lora_rank={self._max_rank} at {module}", rank)
        for name, shape in ((names["A"], (rank, base.inputs)), (names["B"], (base.outputs, rank))):
            if file.tensors[name].shape != shape:
                raise AdapterError(name, f"must have shape {list(shape)}", list(file.tensors[name].shape))
        return _Pair(names["A"], names["B"], base.kind == "embedding", rank)

    # ---------------------------------------------------------------- weights

    def _read(
        self, config: PeftConfig, file: TensorFile | AdapterTensors, module: str, pair: _Pair, digest: Any
    ) -> LoraWeights:
        """The weights of `module`, ready for a slot; `digest` gets what the file says of them."""
        a, b, scaling = file.read(pair.a), file.read(pair.b), config.scaling_of(module)
        if a.dtype != b.dtype:
            raise AdapterError(pair.b, f"must have the dtype of its lora_A, {a.dtype}", str(b.dtype))
        head = f"{module!r} {pair.embedding} {scaling.hex()} {a.dtype} {tuple(a.shape)}{tuple(b.shape)}\n"
        digest.update(head.encode())
        for tensor in (a, b):
            digest.update(tensor.view(torch.uint8).numpy().data)
        factor = scaling * self._base[module].scale
        return LoraWeights(module, self._cast(pair.a, a, 1.0), self._cast(pair.b, b, factor), pair.embedding)

    def _cast(self, name: str, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        """`tensor` times `factor`, rounded once to the model's dtype. Finite: in a batch an infinity would reach its
        neighbours (0 * inf)."""
        cast = torch.empty(tensor.shape, dtype=self._dtype)
        for source, target in zip(pieces(tensor), pieces(cast), strict=True):
            target.copy_(source.float() * factor)
            if not bool(torch.isfinite(target).all()):
                raise AdapterError(name, f"has values beyond the model's {self._dtype} (lora_alpha / r counted in)")
        return cast
