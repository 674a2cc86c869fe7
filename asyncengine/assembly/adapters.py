"""The registry of a model's adapters, and the memory that they take on its device."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from asyncengine.config import AdapterSettings
from asyncengine.demo import resolve_adapter
from asyncengine.errors import AdapterError, InvalidParameter

if TYPE_CHECKING:
    import torch

    from asyncengine.lora.layers.slots import LoraLayers
    from asyncengine.lora.registry import AdapterRegistry

logger = logging.getLogger("asyncengine")


def make_adapters(
    lora: LoraLayers, dtype: torch.dtype, config: AdapterSettings, max_passes: int, device: torch.device
) -> AdapterRegistry:
    """Make the registry of a model's adapters, with those of the configuration already read, and with memory on the
    device for these, before the KV cache takes its share of what is free.

    Raises `AdapterError` for one that `config.adapters` names; one that was only found in `adapter_root` is left out.
    """
    from asyncengine.lora.checkpoint.files import discover
    from asyncengine.lora.checkpoint.peft_loader import PeftLoader
    from asyncengine.lora.registry import AdapterRegistry

    loader = PeftLoader(lora.modules, dtype=dtype, max_rank=config.max_lora_rank, root=config.adapter_root)
    registry = AdapterRegistry(
        loader, max_bytes=int(config.adapter_memory), workers=config.adapter_workers, max_passes=max_passes
    )
    try:
        paths = {name: resolve_adapter(path, config.adapter_root) for name, path in dict(config.adapters).items()}
        named = {name: registry.load(name, path) for name, path in paths.items()}
        try:
            seen = {} if loader.root is None else discover(loader.root)
        except OSError as error:
            reason = f"cannot be read ({type(error).__name__})"
            raise InvalidParameter("adapter_root", reason, config.adapter_root) from error
        found = {name: registry.load(name, path) for name, path in seen.items() if name not in named}
        for name, loading in named.items():
            try:
                loading.result()
            except AdapterError as error:
                raise type(error)(error.field, f"{error.limit} (adapter {name!r})", error.value) from error
        for name, loading in found.items():
            if (broken := loading.exception()) is not None:
                logger.warning("adapter %s in adapter_root is left out: %s", name, broken)
        allocate_adapters(lora, registry, device)
    except BaseException:
        registry.close()
        raise
    return registry


def allocate_adapters(lora: LoraLayers, adapters: AdapterRegistry, device: torch.device) -> None:
    """Take memory for the adapters that are there."""
    from asyncengine.execution.device.memory import in_words

    known = adapters.list()
    if known:
        # nothing is launched for what no adapter changes; a later one takes memory for its modules when it is written
        paths = dict.fromkeys(path for info in known for path in info.modules)
        take = partial(lora.allocate, paths, max(info.rank for info in known))
        in_words(take, device, "the memory for adapters", "Lower max_loras, or leave out those of high rank.")
