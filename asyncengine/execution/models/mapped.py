"""Weights out of memory-mapped files without holding them twice.

safetensors hands out tensors that live in the mapped file. Copying or repacking them leaves the file's pages counted
as this process's memory until the whole file is unmapped, which happens only when its last tensor goes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from asyncengine.errors import ModelNotFound, shorten

if TYPE_CHECKING:
    import torch

_MOST_OPEN = 2
"""Files that are kept open: parts of a matrix lie in one file or in neighbours."""


class MappedFiles:
    """The address ranges of weight files mapped into this process when it was made."""

    def __init__(self, files: Iterable[Path]) -> None:
        """A file is known by its path, not its name: a hub's download has links that lead to other names."""
        paths = frozenset(map(os.path.realpath, files))
        self._ranges: list[tuple[int, int]] = []
        if not sys.platform.startswith("linux"):
            return
        try:
            with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
                for line in maps:
                    fields = line.rstrip("\n").split(maxsplit=5)  # address, rights, offset, device, inode, path
                    if len(fields) == 6 and fields[5] in paths:
                        begin, end = fields[0].split("-")
                        self._ranges.append((int(begin, 16), int(end, 16)))
        except OSError:  # no /proc: pages stay until the file is unmapped
            return

    def around(self, tensor: torch.Tensor) -> MappedFiles:
        """Watch the one mapping that `tensor` lies in, and no longer those that somebody else in this process has of
        the same file: a model of transformers lives in its own, and a trainer writes there."""
        first = tensor.data_ptr()
        self._ranges = [(begin, end) for begin, end in self._ranges if begin <= first < end]
        return self

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if `tensor`'s memory is part of a mapped weight file."""
        if tensor.device.type != "cpu":
            return False
        first = tensor.untyped_storage().data_ptr()
        last = first + tensor.untyped_storage().nbytes()
        return any(begin <= first and last <= end for begin, end in self._ranges)

    def release(self, tensor: torch.Tensor) -> None:
        """Let the system take back the whole pages under `tensor`; they are read from the file again if touched.

        Nothing happens to memory that is not a mapped file's, or not contiguous. Nobody may have written to it: then
        this is invisible but for its speed.
        """
        if not self.holds(tensor) or not tensor.is_contiguous():
            return
        from asyncengine.execution.device.arena import give_back  # brings torch, which paths are looked at without

        give_back(tensor.data_ptr(), tensor.nbytes)


class OpenFiles:
    """The safetensors files that were read from last, each mapped while it is open."""

    def __init__(self) -> None:
        self._streams: dict[Path, Any] = {}
        self._mapped: dict[Path, MappedFiles] = {}

    def read(self, file: Path, name: str) -> torch.Tensor:
        """A tensor, mapped and not copied. Raises `ModelNotFound` for a file that is none."""
        stream = self._streams.pop(file, None)
        known = stream is not None
        try:
            if stream is None:
                stream = safe_open(str(file), framework="pt")
            tensor: torch.Tensor = stream.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelNotFound(f"{file} is not a whole safetensors file: {shorten(str(error), 300)}") from None
        self._streams[file] = stream  # the last one that was used
        if not known:
            while len(self._streams) > _MOST_OPEN:
                oldest = next(iter(self._streams))
                del self._streams[oldest], self._mapped[oldest]
            self._mapped[file] = MappedFiles([file]).around(tensor)  # it is mapped when its first tensor is asked for
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        """Let the system take back the pages under a tensor of `read`, or a part of one; nothing happens to others."""
        for mapped in self._mapped.values():
            mapped.release(tensor)


def own_weights(module: Any, files: MappedFiles) -> None:
    """Copy every parameter and buffer that still lives in a mapped file into memory of its own, one at a time.

    After this the files may be changed or removed while the model runs. Shared (tied) parameters stay shared.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if files.holds(tensor):
            mapped = tensor.data
            tensor.data = mapped.clone()
            files.release(mapped)
