"""Release of memory-mapped weight files while they are read, so that no weight takes memory twice.

safetensors returns tensors that live in the mapped file. After they have been copied or packed, the file's pages still
count as this process's memory until the file is unmapped, which happens only when its last tensor is freed.
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
"""Files that are kept open: the tensors of a quantized matrix lie in one file or in two consecutive ones."""


class MappedFiles:
    """Address ranges at which weight files were mapped into this process when the object was created."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Files are identified by their real paths: the hub's cache has links to files of other names."""
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
        """Keep only the mapping that `tensor` lies in. Others in this process may map the same file: a trainer's
        transformers model lives in such a mapping and is written to, so its pages must not be released."""
        first = tensor.data_ptr()
        self._ranges = [(begin, end) for begin, end in self._ranges if begin <= first < end]
        return self

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`'s memory is part of a mapped weight file."""
        if tensor.device.type != "cpu":
            return False
        first = tensor.untyped_storage().data_ptr()
        last = first + tensor.untyped_storage().nbytes()
        return any(begin <= first and last <= end for begin, end in self._ranges)

    def release(self, tensor: torch.Tensor) -> None:
        """Let the system reclaim the whole pages under `tensor`; a later access reads them from the file again.

        Does nothing for memory outside of mapped files or a tensor that is not contiguous. The tensor must not have
        been written to, as the changes would be lost.
        """
        if not self.holds(tensor) or not tensor.is_contiguous():
            return
        from asyncengine.execution.device.arena import give_back  # imports torch, which refusing a path does not need

        give_back(tensor.data_ptr(), tensor.nbytes)


class OpenFiles:
    """The safetensors files that were used last, each mapped while it is open."""

    def __init__(self) -> None:
        self._streams: dict[Path, Any] = {}
        self._mapped: dict[Path, MappedFiles] = {}

    def read(self, file: Path, name: str) -> torch.Tensor:
        """The tensor `name` of a file, mapped and not copied. Raises `ModelNotFound` for a broken file."""
        stream = self._streams.pop(file, None)
        known = stream is not None
        try:
            if stream is None:
                stream = safe_open(str(file), framework="pt")
            tensor: torch.Tensor = stream.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelNotFound(f"{file} is not a whole safetensors file: {shorten(str(error), 300)}") from None
        self._streams[file] = stream  # a dict keeps the order of insertion: the first one was used longest ago
        if not known:
            while len(self._streams) > _MOST_OPEN:
                oldest = next(iter(self._streams))
                del self._streams[oldest], self._mapped[oldest]
            self._mapped[file] = MappedFiles([file]).around(tensor)  # it is mapped when its first tensor is asked for
        return tensor

    def release(self, tensor: torch.Tensor) -> None:
        """Let the system reclaim the pages under a tensor of `read`, or a slice of one; does nothing for others."""
        for mapped in self._mapped.values():
            mapped.release(tensor)


def own_weights(module: Any, files: MappedFiles) -> None:
    """Copy every parameter and buffer of `module` that still lives in a mapped file, one at a time.

    Afterwards the files may be changed or removed while the model runs. Tied parameters stay tied.
    """
    for tensor in (*module.parameters(), *module.buffers()):
        if files.holds(tensor):
            mapped = tensor.data
            tensor.data = mapped.clone()
            files.release(mapped)
