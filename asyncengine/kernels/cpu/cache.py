"""Compiled kernels on disk: one folder of the user's for all virtual environments, one file for each kernel.

    <cache folder>/kernels/<key>/<module>.<function>-<digest>.kernel

The cache folder is `ASYNCENGINE_CACHE`, else the platform's folder for caches. The key is a digest of everything that
machine code depends on beside the function itself: the source of all kernels, the CPU and its features, whether its
matrix unit is used, the versions of numba, llvmlite and Python. numba's own cache lies beside the source, where each
virtual environment has one and a read-only installation none; its settings are the program's and stay untouched.

A file is the digest of its content, then the content, and appears under its name complete: a process that reads half a
file, or one with another digest, compiles. Machine code is run, so a folder that another user could write to is not
read. No fault of the folder fails a load: kernels are then compiled and not kept, which is logged once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
import os
import pickle
import platform
import re
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.compiler import CompileResult
from numba.core.registry import cpu_target
from numba.core.runtime import rtsys
from numba.core.serialize import dumps

from asyncengine.kernels.cache_folder import VARIABLE, kernels_root
from asyncengine.kernels.cpu.vectors import UNIT
from asyncengine.kernels.elsewhere import elsewhere, watcher

logger = logging.getLogger("asyncengine")

_UNUSED_SECONDS = 90 * 86400.0
"""After which a folder of another key goes: of an older release, a virtual environment or a machine that is no more."""
_MOST_BYTES = 256 << 20
"""Bytes kept for all other keys, the lately used first. One has about 5 MB, so that some fifty machines may share a
disk."""
_DIGEST = hashlib.sha256
_KERNEL = re.compile(r"^ *@serial\w*$|^@(?:team_kernel|blocks_of)\(|^\w+ = (?:with_gil|serial\w*)\(.+\)$", re.MULTILINE)


def stamp_of(folder: Path) -> str:
    """A hash of all source in a folder: a compiled function contains the code of those that it calls, which may be in
    any file."""
    digest = _DIGEST()
    for file in sorted(folder.glob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:8]


class KernelFolder:
    """The files of one key. With `folder` None, nothing is kept, and `find` finds nothing; `refused` says why."""

    def __init__(self, folder: Path | None, refused: str = "") -> None:
        self.folder = folder
        self._open = False
        if folder is None:
            self._give_up(refused)

    @property
    def writable(self) -> bool:
        """Whether other processes can find kernels that this one keeps."""
        if self.folder is None:
            return False
        try:
            self._make(self.folder)
        except OSError:
            return False
        return self._is_ours(self.folder) and os.access(self.folder, os.W_OK)

    def find(self, name: str) -> bytes | None:
        """The bytes kept under this name, or None if there are none, or not all of them."""
        if self.folder is None or not self._is_ours(self.folder):
            return None
        try:
            content = (self.folder / name).read_bytes()
        except OSError:
            return None
        size = _DIGEST().digest_size
        return content[size:] if _DIGEST(content[size:]).digest() == content[:size] else None

    def keep(self, name: str, data: bytes) -> None:
        """Write a file for this and other processes. If several write the same name, the last one's stays."""
        if self.folder is None:
            return
        try:
            self._make(self.folder)
            if not self._is_ours(self.folder):
                return
            unfinished = self.folder / f".{uuid.uuid4().hex}"
            try:
                unfinished.write_bytes(_DIGEST(data).digest() + data)
                unfinished.replace(self.folder / name)
            except BaseException:
                with contextlib.suppress(OSError):
                    unfinished.unlink()
                raise
        except OSError as error:
            self._give_up(str(error))

    def _is_ours(self, folder: Path) -> bool:
        """Whether only this user and root may have put files there. False also where there is no folder."""
        if self._open:
            return True
        try:
            status = folder.stat()
        except OSError:
            return False
        if hasattr(os, "getuid") and (status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022):
            self._give_up(f"{folder} belongs to somebody else, or others may write to it")
            return False
        self._open = True
        with contextlib.suppress(OSError):
            os.utime(folder)  # lately used: `_make` of another key leaves it alone
        return True

    def _make(self, folder: Path) -> None:
        """Make the folder of a new key, and remove other keys' that are unused for long or beyond `_MOST_BYTES`."""
        if folder.is_dir():
            return
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        other_keys = [_use_of(old) for old in folder.parent.iterdir() if old.name != folder.name and _is_key(old)]
        bytes_left = _MOST_BYTES
        for used_at, size, old in sorted(other_keys, reverse=True):
            bytes_left -= size
            if bytes_left < 0 or used_at < time.time() - _UNUSED_SECONDS:
                shutil.rmtree(old, ignore_errors=True)

    def _give_up(self, reason: str) -> None:
        self.folder = None
        logger.warning(
            "compiled kernels are not kept, so every start compiles them anew: %s. %s names another folder",
            reason, VARIABLE,
        )  # fmt: skip


def _is_key(path: Path) -> bool:
    return len(path.name) == 16 and not set(path.name) - set("0123456789abcdef") and path.is_dir()


def _use_of(folder: Path) -> tuple[float, int, Path]:
    """(time of last use, bytes, folder). One that another process removes meanwhile counts as old and empty."""
    try:
        return folder.stat().st_mtime, sum(file.stat().st_size for file in folder.iterdir()), folder
    except OSError:
        return 0.0, 0, folder


def folder_here() -> KernelFolder:
    """The folder for kernels of this machine and process."""
    return kernel_folder(cpu_target.target_context.codegen().magic_tuple())


@functools.cache
def kernel_folder(machine: tuple[str, ...]) -> KernelFolder:
    """The folder for kernels compiled here, for `machine`: what numba compiles for (triple, CPU, features)."""
    python = (platform.python_implementation(), *sys.version_info[:2], getattr(sys, "abiflags", ""))
    identity = (stamp_of(Path(__file__).parent), machine, UNIT, numba.__version__, llvmlite.__version__, python)
    try:
        root = kernels_root(os.environ, sys.platform)
    except RuntimeError as error:
        return KernelFolder(None, str(error))
    return KernelFolder(root / _DIGEST(repr(identity).encode()).hexdigest()[:16])


class KernelCache:
    """The cache that numba asks for a function's code before compiling it, and gives it to afterwards.

    Takes the place of `numba.core.caching.FunctionCache`, and keeps the same of a compilation. A function that closes
    over other compiled ones (tiles, say), which have no lasting names, has an attribute `made_for`: a text that stands
    for them in its name.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def load_overload(self, signature: Any, target: Any) -> Any:
        """A `CompileResult`; None if there is none, and numba compiles the function next."""
        rtsys.initialize(target)  # kept code calls numba's runtime; compiling code would have initialised it
        folder = kernel_folder(target.codegen().magic_tuple())
        data = folder.find(self._name(signature))
        if data is None and _was_awaited(self._function.__module__, signature):
            data = folder.find(self._name(signature))
        if data is not None:
            try:
                return CompileResult._rebuild(target, *pickle.loads(data))
            except Exception:
                logger.info("a kept kernel cannot be used and is compiled anew", exc_info=True)
        _tell(self._function)
        return None

    def save_overload(self, signature: Any, result: Any) -> None:
        if result.library.has_dynamic_globals or any(not loop.can_cache for loop in result.lifted):
            return  # holds an address of this process
        kernel_folder(result.codegen.magic_tuple()).keep(self._name(signature), dumps(result._reduce()))

    def _name(self, signature: Any) -> str:
        function = self._function
        form = getattr(function, "made_for", None)
        captured = [form] if form else [cell.cell_contents for cell in function.__closure__ or ()]
        identity = (
            _source(inspect.getfile(function)), function.__module__, function.__qualname__,
            function.__code__.co_firstlineno, function.__code__.co_code, dumps(captured) if captured else b"",
            type(signature).__name__, str(signature),
        )  # fmt: skip
        module = function.__module__.rpartition(".")[2]
        return f"{module}.{function.__name__}-{_DIGEST(repr(identity).encode()).hexdigest()[:16]}.kernel"


class InlinedCache(KernelCache):
    """A cache that keeps nothing, for functions that are only inlined into others."""

    def load_overload(self, signature: Any, target: Any) -> None:
        _tell(self._function)

    def save_overload(self, signature: Any, result: Any) -> None:
        pass


def _was_awaited(module: str, signature: Any) -> bool:
    """Whether other processes were compiling a function of these arguments, and this call waited for them."""
    if not elsewhere:
        return False
    types = f"({', '.join(map(str, getattr(signature, 'args', signature)))})"
    return any(compiler.wait_for(module, types) for compiler in tuple(elsewhere))


def _tell(function: Callable[..., Any]) -> None:
    """Tell the watcher that this function is compiled next."""
    report = watcher.get()
    if report is not None:
        report(function.__name__.strip("_").replace("_", " "), kernel_count())


@functools.cache
def _source(file: str) -> bytes:
    try:
        return _DIGEST(Path(file).read_bytes()).digest()
    except OSError:
        return b""


@functools.cache
def kernel_count() -> int:
    """Functions of this package that have code of their own. No load needs all of them."""
    definitions = [_KERNEL.findall(file.read_text(encoding="utf-8")) for file in Path(__file__).parent.glob("*.py")]
    return sum(map(len, definitions))
