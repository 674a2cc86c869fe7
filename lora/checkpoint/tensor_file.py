"""A safetensors file of any origin: nothing it says is believed before it is checked.

The header must describe the file exactly: no gap, no overlap, no key twice, every extent consistent. Tensors are read
one by one, into memory of their own, only when asked for.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import BufferedReader
from typing import Any, NamedTuple

import torch

from asyncengine.errors import AdapterError

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
