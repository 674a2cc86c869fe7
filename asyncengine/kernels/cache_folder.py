"""The folder of compiled kernels. Imports neither torch nor numba, so that it can be asked before they are there."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "ASYNCENGINE_CACHE"


def cache_root(environment: Mapping[str, str], system: str) -> Path:
    """The folder for what can be made again. `system` as in `sys.platform`. Raises `RuntimeError` without a home."""
    if environment.get(VARIABLE):
        return Path(os.path.abspath(Path(environment[VARIABLE]).expanduser()))
    if os.path.isabs(environment.get("XDG_CACHE_HOME", "")):
        return Path(environment["XDG_CACHE_HOME"], "asyncengine")
    if system == "darwin":
        return Path.home() / "Library" / "Caches" / "asyncengine"
    if system == "win32" and environment.get("LOCALAPPDATA"):
        return Path(environment["LOCALAPPDATA"], "asyncengine", "Cache")
    return Path.home() / ".cache" / "asyncengine"


def kernels_root(environment: Mapping[str, str], system: str) -> Path:
    """The folder in `cache_root` with a folder for each key. Raises `RuntimeError` without a home."""
    return cache_root(environment, system) / "kernels"


def is_first_time(environment: Mapping[str, str], system: str) -> bool:
    """Whether no kernel was ever kept here, and some can be."""
    try:
        root = kernels_root(environment, system)
        above = next(folder for folder in root.parents if folder.is_dir())
        return not root.is_dir() and os.access(above, os.W_OK)
    except (RuntimeError, OSError, StopIteration):
        return False
