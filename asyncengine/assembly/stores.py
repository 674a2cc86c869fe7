"""Opening of the durable prefix cache: the folder, and the fingerprint of everything that keys and values depend on."""

from __future__ import annotations

import logging
import os
import stat
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from asyncengine.engine.prefix_store import PrefixStore
from asyncengine.errors import InvalidParameter
from asyncengine.kvcache.store.disk import SystemDisk
from asyncengine.kvcache.store.record import fingerprint_of
from asyncengine.kvcache.store.segments import SegmentStore

if TYPE_CHECKING:
    from asyncengine.execution.api import BuiltModel

logger = logging.getLogger("asyncengine")


def open_prefix_store(built: BuiltModel, undo: ExitStack) -> PrefixStore | None:
    """The store that the configuration asks for, which `undo` closes; None: it asks for none. Raises `InvalidParameter`
    naming `kv_cache_dir` for a folder that cannot be one, and where pages cannot be copied."""
    config, identify = built.config, built.identify
    if config.kv_cache_dir is None:
        return None
    if identify is None:
        raise InvalidParameter("kv_cache_dir", f"works on a CPU; the model runs on {built.info.device}")
    if not config.prefix_caching:
        raise InvalidParameter("kv_cache_dir", "needs prefix_caching=True", config.kv_cache_dir)
    folder = make_folder(folder_of(config.kv_cache_dir))
    try:
        store = SegmentStore(SystemDisk(), str(folder), fingerprint_of(identify()), int(config.kv_cache_disk))
    except OSError as error:
        raise InvalidParameter("kv_cache_dir", f"cannot be read: {error}", config.kv_cache_dir) from None
    logger.info("prefixes are kept in %s: %d records of this model", folder, len(store))
    prefixes = PrefixStore(
        store, built.runner.page_memory(), config.page_size, prompt_rate=built.prompt_rate(),
        salted=config.kv_cache_salted, evicted=config.kv_cache_write == "on_eviction",
    )  # fmt: skip
    undo.callback(prefixes.close)
    return prefixes


def folder_of(setting: str | bool) -> Path:
    """The folder that `kv_cache_dir` means; True: one in the user's cache folder. Raises `InvalidParameter`."""
    if not isinstance(setting, bool):
        return Path(setting).expanduser()
    from asyncengine.kernels.api import cache_root

    try:
        return cache_root(os.environ, sys.platform) / "prefixes"
    except RuntimeError:
        raise InvalidParameter("kv_cache_dir", "must be the path of a folder: this user has no home", True) from None


def make_folder(folder: Path) -> Path:
    """The folder, made for this user alone if it is not there. Raises `InvalidParameter` where it cannot be, or others
    could put into it what this process would believe."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise InvalidParameter("kv_cache_dir", f"cannot be made: {error}", str(folder)) from None
    if status.st_uid not in (os.geteuid(), 0) or (status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX):
        raise InvalidParameter("kv_cache_dir", "must be a folder that only this user can write", str(folder))
    return folder
