"""Digests of all that a model's weights and results depend on, to the bit: files, code, libraries, the CPU."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncengine
from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.files import written_whole

if TYPE_CHECKING:
    from asyncengine.execution.models.formats import CheckpointSource
    from asyncengine.execution.models.loading import LoadedModel

logger = logging.getLogger("asyncengine")

_PIECE = 64 * 2**20
"""Bytes of a file that one thread hashes at a time."""
_KNOWN = "weights.json"
"""Name of the file with known digests of weight files, by `stamp_of`."""
SOURCES = (
    "execution/attention", "execution/layers", "execution/models", "execution/runner", "kernels", "lora",
)  # fmt: skip
"""Folders of the package whose code and tables determine the bits of weights, keys, values and states."""


def digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(files: Sequence[Path], folder: Path | None) -> str:
    """Digest of the content of weight files. `folder`: cache of digests, from which those of unchanged files come."""
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        read = {} if folder is None else json.loads((folder / _KNOWN).read_text("utf-8"))
        known = read if isinstance(read, dict) else {}
    digests, new = [], False
    for file in files:
        key = stamp_of(file)
        if key not in known:
            known[key], new = _digest_of_file(file, file.stat().st_size), True
        digests.append(known[key])
    if new and folder is not None:
        try:
            with written_whole(folder / _KNOWN) as kept:
                kept.write(json.dumps(dict(list(known.items())[-1000:])).encode())
        except OSError as error:
            logger.info("digests of weights are not kept: %s", error)
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def stamp_of(file: Path) -> str:
    """A string that changes whenever the file is written: path, size, times, inode and device."""
    at = file.stat()
    return f"{file.resolve()} {at.st_size} {at.st_mtime_ns} {at.st_ctime_ns} {at.st_ino} {at.st_dev}"


def _digest_of_file(file: Path, size: int) -> str:
    """SHA-256 of the SHA-256 digests of the file's pieces, which several threads compute."""

    def digest(start: int) -> bytes:
        with file.open("rb") as stream:
            stream.seek(start)
            made, left = hashlib.sha256(), min(_PIECE, size - start)
            while left and (data := stream.read(min(left, 2**20))):
                made.update(data)
                left -= len(data)
            return made.digest()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return hashlib.sha256(b"".join(threads.map(digest, range(0, size, _PIECE)))).hexdigest()


def digest_of_code(package: Path = Path(__file__).parents[2]) -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        for file in sorted([*(package / name).rglob("*.py"), *(package / name).rglob("*.toml")]):
            digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def versions() -> Iterable[str]:
    """Versions of Python and of the libraries that take part in computations."""
    import numpy as np
    import torch

    yield from (torch.__version__, np.__version__, version("transformers"), platform.python_version())
    with contextlib.suppress(ImportError):
        import llvmlite
        import numba

        yield from (numba.__version__, llvmlite.__version__)


def machine(*, steady: bool) -> list[str]:
    """The CPU's features, by which kernels are chosen, and, unless sums are `steady`, the number of threads."""
    import torch

    return [platform.machine(), *_features(), "" if steady else str(torch.get_num_threads())]


def _features() -> Iterator[str]:
    with contextlib.suppress(ImportError):
        from llvmlite import binding

        yield str(binding.get_host_cpu_name())
        yield from sorted(name for name, there in binding.get_host_cpu_features().items() if there)
        return
    import torch

    yield torch.backends.cpu.get_cpu_capability()


def identity_of(
    config: EngineConfig, checkpoint: CheckpointSource, loaded: LoadedModel, layout: str, folder: Path | None
) -> Callable[[], Mapping[str, str]]:
    """Function that returns all that a KV page's bytes depend on besides its tokens and adapter: weights, their forms
    and types, the `layout` of pages, rotary and other settings of the model, code, libraries and the CPU. Its first
    call reads the weight files (seconds for gigabytes), except those whose digests are kept in `folder`. It raises
    `InvalidParameter` if they have changed since the model was loaded. It holds no reference to the model."""
    text = json.dumps(checkpoint.config, default=str)
    scaled = "longrope" in text or "dynamic" in text  # frequencies follow `max_model_len` (docs/contract.md, 5)
    longest = config.max_model_len if scaled else None
    forms = sorted(form for form in loaded.fused if not form.startswith("recorded_layers"))  # same bits as without
    facts = {
        "model configuration": digest_of([checkpoint.config, longest]),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "page size": str(config.page_size),
        "quantization": f"{config.quantization} {config.load_format}",
        "kernels": digest_of([config.fuse, forms, sorted(loaded.stored.items()), loaded.unsteady]),
        "LoRA settings": f"{config.max_loras} {config.max_lora_rank}",
        "page layout": layout,
    }
    files, steady = (*checkpoint.files, *(loaded.head.files if loaded.head else ())), loaded.unsteady is None
    stamps = [stamp_of(file) for file in files]

    @cache
    def identify() -> Mapping[str, str]:
        weights = weights_digest(files, folder)
        if [stamp_of(file) for file in files] != stamps:
            raise InvalidParameter("model", "has other files than when it was loaded: its weights have no digest")
        return {
            "model weights": weights,
            **facts,
            "version": asyncengine.__version__,
            "code": digest_of_code(),
            "libraries": " ".join(versions()),
            "CPU, or threads": digest_of(machine(steady=steady)),
        }

    return identify
