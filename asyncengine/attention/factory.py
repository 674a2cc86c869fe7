"""Choosing an attention backend and the size of its KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from asyncengine.attention.base import AttentionBackend, LayerSpec, page_bytes
from asyncengine.attention.torch_paged import TorchPagedBackend
from asyncengine.config import EngineConfig
from asyncengine.errors import OutOfMemory

_CPU_SHARE, _CPU_CAP = 0.25, 4 * 2**30
_CUDA_SHARE = 0.85
_MODEST_TOKENS = 256
"""A pool that cannot hold one request of this length (or of the model's whole context, if less) is refused."""


def num_pages_for(
    layers: Sequence[LayerSpec],
    config: EngineConfig,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    free_bytes: int,
) -> int:
    """Pages of the pool, page 0 included.

    `kv_cache_memory` bytes if given; else a share of `free_bytes`, at most what `max_num_seqs` requests of
    `max_model_len` tokens fill, and on CPU at most 4 GiB (the machine has other work). Raises `OutOfMemory` with the
    numbers if a request of modest length would not fit, or if more is asked for than is free.
    """
    size = page_bytes(layers, config.page_size, dtype)
    assert config.kv_cache_memory is None or isinstance(config.kv_cache_memory, int)
    if config.kv_cache_memory is not None:
        budget = config.kv_cache_memory
        if budget > free_bytes:
            raise OutOfMemory(
                f"kv_cache_memory asks for {_mib(budget)}, but only {_mib(free_bytes)} are free on {device}"
            )
    elif device.type == "cpu":
        budget = min(int(free_bytes * _CPU_SHARE), _CPU_CAP)
    else:
        budget = int(free_bytes * _CUDA_SHARE)
    per_request = -(-max_model_len // config.page_size)
    pages = min(budget // size, config.max_num_seqs * per_request + 1)
    least = -(-min(_MODEST_TOKENS, max_model_len) // config.page_size) + 1
    if config.kv_cache_memory is not None:
        least = 2
    if pages < least:
        raise OutOfMemory(
            f"the KV cache gets {_mib(budget)}, which is {pages} pages of {config.page_size} tokens "
            f"({size / 1024:.0f} KiB each); at least {least} are needed"
        )
    return pages


def make_backend(
    config: EngineConfig, layers: Sequence[LayerSpec], num_pages: int, dtype: torch.dtype, device: torch.device
) -> AttentionBackend:
    """The backend `config.attention_backend` names ("auto": the torch one)."""
    return TorchPagedBackend(layers, num_pages, config.page_size, dtype, device)


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
