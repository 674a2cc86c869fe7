"""Opening of the durable prefix cache: the folder, and the fingerprint of everything that keys and values depend on."""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncengine
from asyncengine.config import EngineConfig
from asyncengine.engine.prefix_store import PrefixStore
from asyncengine.errors import InvalidParameter
from asyncengine.kvcache.store.disk import SystemDisk
from asyncengine.kvcache.store.record import Identity, fingerprint_of
from asyncengine.kvcache.store.segments import SegmentStore

if TYPE_CHECKING:
    from asyncengine.execution.models.formats import CheckpointSource
    from asyncengine.execution.models.loading import LoadedModel
    from asyncengine.execution.runner.model_runner import ModelRunner

logger = logging.getLogger("asyncengine")


def open_prefix_store(
    config: EngineConfig, loaded: LoadedModel, runner: ModelRunner, identify: Callable[[], Identity] | None,
    undo: ExitStack,
) -> PrefixStore | None:  # fmt: skip
    """The store that `config` asks for, which `undo` closes; None: it asks for none. `identify`: see `identity_of`;
    None where pages cannot be copied. Raises `InvalidParameter` naming `kv_cache_dir` for a folder that cannot be one.
    """
    if config.kv_cache_dir is None:
        return None
    from asyncengine.execution.runner.building import measure_prompt_rate

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
    from asyncengine.kernels.cache_folder import cache_root

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
    from asyncengine.execution.models.identity import (
        digest_of,
        digest_of_code,
        machine,
        stamp_of,
        versions,
        weights_digest,
    )

    if loaded.device.type != "cpu" or (runner.ranks is not None and not runner.ranks.gather.exact):
        return None
    longest = config.max_model_len if _follows_length(checkpoint.config) else None
    forms = sorted(form for form in loaded.fused if not form.startswith("recorded_layers"))  # which has the same bits
    parts = {
        "model configuration": digest_of([checkpoint.config, longest]),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "page size": str(config.page_size),
        "quantization": f"{config.quantization} {config.load_format}",
        "kernels": digest_of([config.fuse, forms, sorted(loaded.stored.items()), loaded.unsteady]),
        "LoRA settings": f"{config.max_loras} {config.max_lora_rank}",
        "page layout": runner.page_memory().layout,
    }
    files, steady = checkpoint.files, loaded.unsteady is None
    stamps = [stamp_of(file) for file in files]

    @cache
    def identify() -> Identity:
        weights = weights_digest(files, None if config.kv_cache_dir is None else folder_of(config.kv_cache_dir))
        if [stamp_of(file) for file in files] != stamps:
            raise InvalidParameter("model", "has other files than when it was loaded: its weights have no digest")
        return {
            "model weights": weights,
            **parts,
            "version": asyncengine.__version__,
            "code": digest_of_code(),
            "libraries": " ".join(versions()),
            "CPU, or threads": digest_of(machine(steady=steady)),
        }

    return identify


def _follows_length(model_config: dict[str, Any]) -> bool:
    """Whether the model's rotary frequencies follow `max_model_len` (docs/contract.md, 5)."""
    said = json.dumps(model_config, default=str)
    return "longrope" in said or "dynamic" in said
