"""Reads a PEFT checkpoint into an `Adapter`, or refuses it with the reason.

Names, ranks, shapes and bytes are checked against the base model before a weight is read. The identity of an adapter is
a digest over its effect (module, scaling, weights as stored): the same content has one identity under any name, in any
folder, with any irrelevant setting, and one changed weight gives another. Weights are kept as a device slot takes them:
in the model's dtype, with the scaling folded in.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Hashable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncengine.errors import AdapterError
from asyncengine.lora.adapter import Adapter
from asyncengine.lora.checkpoint.files import CONFIG_FILE, WEIGHTS_FILE, find_folder, open_file, read_config
from asyncengine.lora.checkpoint.peft_config import PEFT_TABLES, PeftConfig, read_peft_config
from asyncengine.seams import LoraWeights, ModuleDims

# Safetensors files of any origin: no number in them is used before it is checked.

MAX_HEADER_BYTES = 8 << 20
"""Limit of the header: adapters of the largest models have some thousand tensors, with about 150 bytes of it each."""

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_PIECE = 1 << 14
"""Elements of a tensor on which torch works with one thread."""


def pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Flat views of a contiguous tensor, so small that torch works on them with the calling thread alone: a thread that
    reads files must not take a core from a running step, which is as slow as its slowest thread."""
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
    """A JSON object. Raises `AdapterError` for other texts, NaN, and a key that is given twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for key, value in pairs:
            if key in members:
                raise ValueError(f"the key {key[:80]!r} is there twice")
            members[key] = value
        return members

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
    """(size in bytes, time of the last write) of an open file."""
    status = os.fstat(stream.fileno())
    return status.st_size, status.st_mtime_ns


class AdapterTensors:
    """Tensors in memory by PEFT's names, with the interface of `TensorFile`. They are not changed."""

    field = "tensors"

    def __init__(self, given: Any) -> None:
        """Raises `AdapterError` for anything but whole float tensors by name."""
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise AdapterError("tensors", "must map PEFT's names to tensors", type(given).__name__)
        self._given: dict[str, torch.Tensor] = dict(given)
        self.tensors: dict[str, Extent] = {}
        dtypes = {dtype: name for name, dtype in DTYPES.items()}
        for name, tensor in self._given.items():
            tensor_type = type(tensor)
            is_plain = tensor_type in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
            if not is_plain or tensor.is_meta or not tensor.numel():
                raise AdapterError(name[:256], "must be a whole tensor with values", tensor_type.__name__)
            if tensor.dtype not in dtypes:
                raise AdapterError(name[:256], "must be float32, float16 or bfloat16", str(tensor.dtype))
            self.tensors[name] = Extent(dtypes[tensor.dtype], tuple(tensor.shape), 0, tensor.nbytes)

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the host, contiguous. Raises `AdapterError` for a value that is not finite."""
        tensor = self._given[name].detach().cpu().contiguous()
        check_finite(name, tensor)
        return tensor


def given_config(config: Any) -> dict[str, Any]:
    """An adapter's configuration as its file would have it, of a mapping or of PEFT's object with `to_dict`.

    Raises `AdapterError` for values that JSON does not have.
    """
    mapping = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(mapping, Mapping):
        raise AdapterError("config", "must be a mapping, as in adapter_config.json, or a LoraConfig", config)
    try:
        text = json.dumps(dict(mapping), default=_listed)
    except (TypeError, ValueError, RecursionError) as error:
        raise AdapterError("config", f"cannot be written as JSON: {error}") from None
    return parse_json(text.encode(), "config")


def _listed(value: Any) -> Any:
    """PEFT keeps names of modules in sets."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


_PREFIX = "base_model.model."
_SIDES: Mapping[str, str] = PEFT_TABLES["sides"]
"""Part of its module that a tensor is, by the end of its name; a longer end goes before a shorter one."""
_SETTINGS: Mapping[str, tuple[str, str]] = PEFT_TABLES["settings"]
"""For each side of a module: the setting that such a tensor requires, and its name for messages."""
_RESIZE = "give the base model as many (resize_token_embeddings), save it with its tokenizer, and load that"
MAX_NAME_CHARS = 256


def _note(digest: Any, head: str, *tensors: torch.Tensor) -> None:
    digest.update(f"{head}\n".encode())
    for tensor in tensors:
        digest.update(tensor.view(torch.uint8).numpy().data)


def _side_of(name: str) -> tuple[str, str]:
    """(module, side of it that the tensor is: "a", "b", ...); side "" if PEFT has no such name."""
    path = name.removeprefix(_PREFIX)
    end = next((end for end in _SIDES if path.endswith(end)), "")
    return (path.removesuffix(end), _SIDES[end]) if end and path != name else (path, "")


class PeftLoader:
    """Loads adapters for one base model. Immutable: any number of threads may load at once."""

    def __init__(
        self, base: Mapping[str, ModuleDims], *, dtype: torch.dtype, max_rank: int,
        root: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        """`base`: the modules that can take an adapter, by Hugging Face path. `dtype`: the model's. `root`: adapters
        lie inside this folder or are refused; None: anywhere."""
        self._base = dict(base)
        self._dtype = dtype
        self._max_rank = max_rank
        self.root = None if root is None else Path(root).expanduser().resolve()

    def fingerprint(self, path: str | os.PathLike[str], max_bytes: int) -> Hashable:
        """A key of the folder and its files' identities, sizes and times, which changes with them. Reads no weights.

        Raises `AdapterError`, also for an adapter that would take more than `max_bytes` of memory.
        """
        folder = find_folder(path, self.root)
        states = []
        need = 0
        for file in (CONFIG_FILE, WEIGHTS_FILE):
            with open_file(folder, file, self.root) as stream:
                status = os.fstat(stream.fileno())
                if file == WEIGHTS_FILE:
                    extents = TensorFile(stream, file).tensors.items()
                    loaded = [extent for name, extent in extents if _side_of(name)[1] not in ("", "copy")]
                    need = sum(math.prod(extent.shape) for extent in loaded) * self._dtype.itemsize
            states.append((status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        if need > max_bytes:
            raise AdapterError("adapter_memory", f"is {max_bytes} bytes, and the adapter needs {need}", str(folder))
        return (folder, *states)

    def load(self, name: str, path: str | os.PathLike[str]) -> Adapter:
        """Read the files of the adapter in `path`. Blocking. Raises `AdapterError`."""
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
        named, digest = self._tensor_names(config, file), hashlib.sha256(b"asyncengine.lora 1\n")
        modules = {module: self._read(config, file, module, names, digest) for module, names in sorted(named.items())}
        modules.update(self._tied(config, file, named))
        rank, nbytes = max(names.rank for names in modules.values()), sum(names.nbytes for names in modules.values())
        invocation = tuple(config.alora_invocation_tokens)
        if invocation:
            digest.update(f"{invocation}\n".encode())
        return Adapter(name, digest.hexdigest(), rank, modules, nbytes, invocation)

    # ---------------------------------------------------------------- names and shapes

    def _tensor_names(self, config: PeftConfig, file: TensorFile | AdapterTensors) -> dict[str, dict[str, str]]:
        """Module -> side -> name of the tensor, after checking that the file has the tensors that the configuration
        asks for and no others, and that they fit the base model."""
        names_of: dict[str, dict[str, str]] = {}
        for name in sorted(file.tensors):
            module, side = self._parse(config, file, name)
            if side != "copy":
                names_of.setdefault(module, {})[side] = name
        if not names_of:
            raise AdapterError(file.field, "holds no adapter weights")
        for module, base in self._base.items():
            sides, is_saved = names_of.get(module, {}).keys(), config.saves(module, base)
            field = ""
            if is_saved and "table" not in sides:
                field = "modules_to_save"
            elif config.tokens_of(module, base) is not None and base.head != "tied" and "tokens" not in sides:
                field = "trainable_token_indices"
            elif not (is_saved or config.all_linear or sides & {"a", "b"}) and config.targets(module, base):
                field = "target_modules"
            if field:
                raise AdapterError(field, f"names {module}, but the file has no weights for it")
        for module, names in names_of.items():
            self._check(config, file, module, names)
        tied = any(base.head == "tied" for base in self._base.values())
        tables = [module for module, names in names_of.items() if "table" in names]
        if tied and len(tables) == 1 and not config.saves(tables[0], self._base[tables[0]]):
            raise AdapterError("modules_to_save", f"does not name {tables[0]}, whose weight another has as well")
        return names_of

    def _tied(
        self, config: PeftConfig, file: TensorFile | AdapterTensors, names_of: Mapping[str, dict[str, str]]
    ) -> dict[str, LoraWeights]:
        """The output layer with the embedding's trained tokens, if it is tied to that and has none of its own."""
        head = next((module for module, base in self._base.items() if base.head == "tied"), "")
        for table, names in names_of.items() if head and "tokens" not in names_of.get(head, {}) else ():
            if "tokens" in names:
                tokens, head_tokens = (config.tokens_of(module, self._base[module]) for module in (table, head))
                if head in names_of or self._base[head].bias or head_tokens not in (None, tokens):
                    reason = f"those of {table} are tied to {head}, which has other weights in the file, or a bias"
                    raise AdapterError("trainable_token_indices", reason)
                return {head: self._read(config, file, head, {"tokens": names["tokens"]}, hashlib.sha256(), tokens)}
        return {}

    def _parse(self, config: PeftConfig, file: TensorFile | AdapterTensors, name: str) -> tuple[str, str]:
        """(module, side of it that the tensor is); "copy" for a table of the base model that PEFT saved along."""
        module, side = _side_of(name)
        if not side or ".lora_" in module or len(name) > 4 * MAX_NAME_CHARS:
            raise AdapterError(name[:MAX_NAME_CHARS], "is not a LoRA tensor as PEFT names them")
        base, (field, words) = self._base.get(module), _SETTINGS.get(side, ("", ""))
        saved = side == "bias" and base is not None and config.saves(module, base)
        if field and not saved and getattr(config, field) in (False, "none", {}):
            raise AdapterError(field, f"the file holds {words}, which the configuration does not say", name)
        if side in ("table", "tokens") and (base is None or not base.of_tokens):
            raise AdapterError("modules_to_save", "only the embedding and the output layer can be trained whole", name)
        if base is None:
            reason = "takes an adapter" if side != "bias" else "has a bias that an adapter can change (norms' cannot)"
            field = name if side != "bias" else "bias"
            raise AdapterError(field, f"the base model has no {module} that {reason} (made for {config.base_name})")
        if side in ("a", "b") and ("_embedding_" in name) != (base.kind == "embedding"):
            raise AdapterError(name, f"does not fit {module}, {'an' if base.kind == 'embedding' else 'no'} embedding")
        if side == "copy" and file.tensors[name].shape != base.table:
            # PEFT saves the table of a targeted embedding or lm_head along; it was frozen, so it equals the base
            # model's unless that was resized
            raise AdapterError("modules_to_save", f"the file holds a table of another size for {module}", name)
        return module, side

    def _check(self, config: PeftConfig, file: TensorFile | AdapterTensors, module: str, names: dict[str, str]) -> None:
        base = self._base[module]
        if len(names.keys() & {"a", "table", "tokens"}) > 1:
            field = "modules_to_save" if "table" in names else "trainable_token_indices"
            raise AdapterError(field, f"{module} has low-rank factors or trained tokens as well; only one can be")
        if config.alora_invocation_tokens and (base.kind == "embedding" or names.keys() != {"a", "b"}):
            raise AdapterError("alora_invocation_tokens", f"is for low-rank factors of linears; {module} has others")
        if names.keys() & {"a", "b", "magnitude", "shift"}:
            self._check_factors(config, module, names)
        if "bias" in names and not base.bias and "table" not in names:
            raise AdapterError("bias", f"{module} has none in the base model", names["bias"])
        rank, tokens, (count, width) = config.rank_of(module)[0], config.tokens_of(module, base) or [], base.table
        shapes: dict[str, tuple[int, ...]] = {
            "a": (rank, base.inputs), "b": (base.outputs, rank), "tokens": (len(tokens), width), "table": base.table,
        }  # fmt: skip
        if "tokens" in names and max(tokens, default=0) >= count:
            raise AdapterError("trainable_token_indices", f"are beyond the {count} rows of {module}; {_RESIZE}")
        for side, name in names.items():
            shape, wanted = file.tensors[name].shape, shapes.get(side, (base.outputs,))
            if side == "table" and shape[1:] == (width,):  # of a vocabulary cut or extended
                if shape[0] > count:
                    raise AdapterError("modules_to_save", f"{module} has {count} rows, not {shape[0]}; {_RESIZE}")
            elif shape != wanted:
                raise AdapterError(name, f"must have shape {list(wanted)}", list(shape))

    def _check_factors(self, config: PeftConfig, module: str, names: dict[str, str]) -> None:
        base, dora = self._base[module], config.use_dora
        for side, wanted in (("b", True), ("a", True), ("magnitude", dora), ("shift", config.lora_bias)):
            if wanted and side not in names:
                field, words = _SETTINGS.get(side, (next(iter(names.values())), f"its lora_{side.upper()}"))
                raise AdapterError(field, f"the file has {module} without {words}")
        tied = base.head == "tied" and config.ensure_weight_tying  # it was made of the embedding's
        if not tied and not config.targets(module, base):
            raise AdapterError("target_modules", f"does not name {module}, but the file has weights for it")
        if config.alora_invocation_tokens and base.kind == "embedding":
            raise AdapterError("alora_invocation_tokens", f"is for linears; {module} is an embedding")
        if config.fan_in_fan_out and base.kind == "linear":
            raise AdapterError("fan_in_fan_out", f"is for Conv1D modules; {module} is a plain linear")
        if dora and (base.kind == "embedding" or not base.whole):
            reason = "an embedding" if base.kind == "embedding" else "spread over several processes, and norms need it"
            raise AdapterError("use_dora", f"DoRA is not supported on {module}: it is {reason}")
        rank, field = config.rank_of(module)
        if rank > self._max_rank:
            raise AdapterError(field, f"is over max_lora_rank={self._max_rank} at {module}", rank)

    # ---------------------------------------------------------------- weights

    def _read(
        self, config: PeftConfig, file: TensorFile | AdapterTensors, module: str, names: dict[str, str], digest: Any,
        tokens: list[int] | None = None,
    ) -> LoraWeights:  # fmt: skip
        """The weights of `module`, ready for a slot. Their stored form is added to `digest`."""
        base, tensors = self._base[module], {side: file.read(name) for side, name in names.items()}
        a, b, scaling, embedding = tensors.pop("a", None), tensors.pop("b", None), 0.0, base.kind == "embedding"
        if a is None or b is None:
            a, b = torch.empty(0, base.inputs, dtype=self._dtype), torch.empty(base.outputs, 0, dtype=self._dtype)
        else:
            scaling = config.scaling_of(module)
            if a.dtype != b.dtype:
                raise AdapterError(names["b"], f"must have the dtype of its lora_A, {a.dtype}", str(b.dtype))
            _note(digest, f"{module!r} {embedding} {scaling.hex()} {a.dtype} {tuple(a.shape)}{tuple(b.shape)}", a, b)
            a, b = self._cast(names["a"], a, 1.0), self._cast(names["b"], b, scaling * base.scale)
        tokens = tokens or (config.tokens_of(module, base) if "tokens" in tensors else None)
        for side, tensor in sorted(tensors.items()):
            _note(digest, f"{module!r} {side} {scaling.hex()} {tensor.dtype} {tuple(tensor.shape)} {tokens}", tensor)
        optional = (tensors.get(side) for side in ("magnitude", "bias", "shift"))
        magnitude, bias, shift = (None if tensor is None else tensor.float() for tensor in optional)
        if shift is not None:
            bias = shift * scaling if bias is None else bias + shift * scaling
        side = "tokens" if tokens is not None else "table"
        table = self._cast(names[side], tensors[side], base.scale) if side in tensors else None
        ids = None if tokens is None else torch.tensor(tokens)
        return LoraWeights(module, a, b, embedding, magnitude, bias, "bias" not in tensors, table, ids)

    def _cast(self, name: str, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        """`tensor` times `factor`, rounded once to the model's dtype. Finite: in a batch an infinity would reach its
        neighbours (0 * inf)."""
        cast = torch.empty(tensor.shape, dtype=self._dtype)
        for source, target in zip(pieces(tensor), pieces(cast), strict=True):
            target.copy_(source.float() * factor)
            if not bool(torch.isfinite(target).all()):
                raise AdapterError(name, f"has values beyond the model's {self._dtype} (lora_alpha / r counted in)")
        return cast
