"""Opening of the durable prefix cache: the folder, and the fingerprint of everything that keys and values depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import platform
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncengine
from asyncengine.config import EngineConfig
from asyncengine.engine.prefix_store import PrefixStore
from asyncengine.errors import InvalidParameter
from asyncengine.kernels.cache_folder import cache_root
from asyncengine.kvcache.store.disk import SystemDisk, written_whole
from asyncengine.kvcache.store.record import Identity, fingerprint_of
from asyncengine.kvcache.store.segments import SegmentStore

if TYPE_CHECKING:
    from asyncengine.models.formats import CheckpointSource
    from asyncengine.models.loading import LoadedModel
    from asyncengine.runner.model_runner import ModelRunner

logger = logging.getLogger("asyncengine")

_PIECE = 64 * 2**20
"""Bytes of a file that one thread digests."""
_KNOWN = "weights.json"
"""Digests of weight files that were digested before, by path, size, times and inode."""
_SOURCES = ("attention", "kernels", "layers", "lora", "models", "runner")
"""Packages whose code decides on the bits of keys, values and states."""


def open_prefix_store(
    config: EngineConfig, loaded: LoadedModel, runner: ModelRunner, identify: Callable[[], Identity] | None,
    undo: ExitStack,
) -> PrefixStore | None:  # fmt: skip
    """The store that `config` asks for, which `undo` closes; None: it asks for none. `identify`: see `identity_of`;
    None where pages cannot be copied. Raises `InvalidParameter` naming `kv_cache_dir` for a folder that cannot be one.
    """
    if config.kv_cache_dir is None:
        return None
    from asyncengine.runner.building import measure_prompt_rate

    if identify is None:
        raise InvalidParameter("kv_cache_dir", f"works on a CPU; the model runs on {loaded.device}")
    if not config.prefix_caching:
        raise InvalidParameter("kv_cache_dir", "needs prefix_caching=True", config.kv_cache_dir)
    folder = make_folder(folder_of(config.kv_cache_dir))
    try:
        store = SegmentStore(SystemDisk(), str(folder), fingerprint_of(identify()), int(config.kv_cache_disk))
    except OSError as error:
        raise InvalidParameter("kv_cache_dir", f"cannot be read: {error}", config.kv_cache_dir) from None
    logger.info("prefixes are kept in %s: %d records of this model", folder, len(store))
    rate = measure_prompt_rate(runner, config, loaded.max_model_len)
    memory = runner.page_memory()
    prefixes = PrefixStore(store, memory, config.page_size, prompt_rate=rate, salted=config.kv_cache_salted)
    undo.callback(prefixes.close)
    return prefixes


def folder_of(setting: str | bool) -> Path:
    """The folder that `kv_cache_dir` means; True: one in the user's cache folder. Raises `InvalidParameter`."""
    if not isinstance(setting, bool):
        return Path(setting).expanduser()
    try:
        return cache_root(os.environ, sys.platform) / "prefixes"
    except RuntimeError:
        raise InvalidParameter("kv_cache_dir", "must be the path of a folder: this user has no home", True) from None


def make_folder(folder: Path) -> Path:
    """The folder, made for this user alone if it is not there. Raises `InvalidParameter` where it cannot be, or others
    could put into it what this process would believe."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise InvalidParameter("kv_cache_dir", f"cannot be made: {error}", str(folder)) from None
    if found.st_uid not in (os.geteuid(), 0) or (found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX):
        raise InvalidParameter("kv_cache_dir", "must be a folder that only this user can write", str(folder))
    return folder


def identity_of(
    config: EngineConfig, checkpoint: CheckpointSource, loaded: LoadedModel, runner: ModelRunner
) -> Callable[[], Identity] | None:
    """Function that gives all that a page's bytes depend on beside its tokens and its adapter: weights, their forms and
    types, the layout of pages, rotary and other settings of the model, code, libraries and the CPU. The first call
    takes seconds for gigabytes of weights, whose files it reads; it raises `InvalidParameter` where they are not the
    ones that were loaded any more. Nothing of the model is held. None: pages cannot be copied, since they are a GPU's,
    or each rank's own."""
    if loaded.device.type != "cpu" or (runner.ranks is not None and not runner.ranks.gather.exact):
        return None
    longest = config.max_model_len if _follows_length(checkpoint.config) else None
    forms = sorted(form for form in loaded.fused if not form.startswith("recorded_layers"))  # which has the same bits
    parts = {
        "model configuration": _digest_of([checkpoint.config, longest]),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "page size": str(config.page_size),
        "quantization": f"{config.quantization} {config.load_format}",
        "kernels": _digest_of([config.fuse, forms, sorted(loaded.stored.items()), loaded.unsteady]),
        "LoRA settings": f"{config.max_loras} {config.max_lora_rank}",
        "page layout": runner.page_memory().layout,
    }
    files, steady = checkpoint.files, loaded.unsteady is None
    stamps = [_stamp(file) for file in files]

    @cache
    def identify() -> Identity:
        weights = weights_digest(files, None if config.kv_cache_dir is None else folder_of(config.kv_cache_dir))
        if [_stamp(file) for file in files] != stamps:
            raise InvalidParameter("model", "has other files than when it was loaded: its weights have no digest")
        return {
            "model weights": weights,
            **parts,
            "version": asyncengine.__version__,
            "code": _digest_of_code(Path(asyncengine.__file__).parent),
            "libraries": " ".join(_versions()),
            "CPU, or threads": _digest_of(_machine(steady=steady)),
        }

    return identify


def _digest_of(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(files: Sequence[Path], folder: Path | None) -> str:
    """Digest of the content of weight files. That of a file that has not changed since is known from `folder`."""
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        read = {} if folder is None else json.loads((folder / _KNOWN).read_text("utf-8"))
        known = read if isinstance(read, dict) else {}
    digests, new = [], False
    for file in files:
        key = _stamp(file)
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


def _stamp(file: Path) -> str:
    """A text that is another one once the file has been written."""
    at = file.stat()
    return f"{file.resolve()} {at.st_size} {at.st_mtime_ns} {at.st_ctime_ns} {at.st_ino} {at.st_dev}"


def _digest_of_file(file: Path, size: int) -> str:
    """SHA-256 of the digests of its pieces, which several threads make."""

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


def _follows_length(model_config: dict[str, Any]) -> bool:
    """Whether the model's rotary frequencies follow `max_model_len` (docs/contract.md, 5)."""
    said = json.dumps(model_config, default=str)
    return "longrope" in said or "dynamic" in said


def _digest_of_code(package: Path) -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        for file in sorted((package / name).rglob("*.py")):
            digest.update(file.relative_to(package).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _versions() -> Iterable[str]:
    """Versions of the libraries that compute."""
    import numpy as np
    import torch
    import transformers

    yield from (torch.__version__, np.__version__, transformers.__version__, platform.python_version())
    with contextlib.suppress(ImportError):
        import llvmlite
        import numba

        yield from (numba.__version__, llvmlite.__version__)


def _machine(*, steady: bool) -> list[str]:
    """The CPU, by whose features kernels are chosen; where sums follow the number of threads, that too."""
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
