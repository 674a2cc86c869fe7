"""The choice of an attention backend."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence

import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import InvalidParameter
from asyncengine.execution.attention.base import AttentionBackend, LayerSpec
from asyncengine.execution.attention.flashinfer import FlashInferBackend, load_flashinfer
from asyncengine.execution.attention.flashinfer_plan import why_not
from asyncengine.execution.attention.torch_paged import TorchPagedBackend
from asyncengine.execution.device.shared_gather import SharedPools
from asyncengine.kernels.api import compiler_missing

logger = logging.getLogger("asyncengine")


def kv_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Type of KV memory for a model of `dtype`."""
    return {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kv_cache_dtype, dtype)


def check_kv_dtype(config: EngineConfig, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device) -> None:
    """Raises `InvalidParameter` if int8 is configured, and keys and values of these layers cannot be kept in it."""
    if config.kv_cache_dtype != "int8":
        return
    missing = compiler_missing(dtype, device)
    if config.attention_backend not in ("auto", "compiled"):
        missing = f'attention_backend is "{config.attention_backend}"'
    if missing is not None:
        missing = f"needs the compiled attention backend; {missing}"
    elif config.page_size % 16:
        missing = f"needs pages of a multiple of 16 tokens, and page_size is {config.page_size}"
    elif any(spec.latent for spec in layers):
        missing = "is not for latent attention, which has one vector for all heads"
    elif any(spec.positions for spec in layers):
        missing = "is not for ALiBi, whose keys hold positions"
    if missing is not None:
        raise InvalidParameter("kv_cache_dtype", missing, "int8")


def make_backend(
    config: EngineConfig, layers: Sequence[LayerSpec], num_pages: int, dtype: torch.dtype, device: torch.device,
    max_model_len: int | None = None, num_window_pages: int = 0, all_kernels: bool = True,
    shared: SharedPools | None = None,
) -> AttentionBackend:  # fmt: skip
    """The backend that `config.attention_backend` names; "auto": FlashInfer or compiled kernels where they run, else
    torch. `num_window_pages`: pages of a second pool for the layers with windows; 0: one pool. `all_kernels`: also
    compile kernels that first steps do not call. `shared`: memory for pages on a CPU; None: torch's.

    Rows have at most `max_model_len` tokens, and at most the pool's unless every layer has a window (None: the pool's).
    Raises `InvalidParameter` if a backend is configured by name and cannot run, or if only FlashInfer has a configured
    feature and it cannot run.
    """
    check_kv_dtype(config, layers, dtype, device)
    kv = kv_dtype(config.kv_cache_dtype, dtype)
    reason = f'attention_backend is "{config.attention_backend}"'
    if config.attention_backend in ("auto", "flashinfer"):
        missing_flashinfer = _flashinfer_missing(layers, dtype, device, config.page_size)
        if missing_flashinfer is None:
            backend = _try_flashinfer(config, layers, num_pages, dtype, device, max_model_len)
            if not isinstance(backend, str):
                return backend
            missing_flashinfer = backend
        reason = missing_flashinfer
        if config.attention_backend == "flashinfer":
            raise InvalidParameter("attention_backend", f"flashinfer cannot be used: {reason}", "flashinfer")
        if device.type == "cuda" and layers:
            logger.warning("attention runs on the slower torch backend: %s", reason)
    if kv == torch.float8_e4m3fn:
        raise InvalidParameter("kv_cache_dtype", f"needs the flashinfer attention backend; {reason}", "fp8")
    if config.attention_backend != "torch":
        missing = compiler_missing(dtype, device)
        if missing is None:
            from asyncengine.execution.attention.cpu import CompiledBackend  # imports numba

            compiled = CompiledBackend(
                layers, num_pages, config.page_size, dtype, num_window_pages=num_window_pages, shared=shared,
                kv_dtype=kv,
            )  # fmt: skip
            if all_kernels:
                compiled.warm_up()
            return compiled
        if config.attention_backend == "compiled":
            raise InvalidParameter("attention_backend", f"compiled cannot be used: {missing}", "compiled")
    return TorchPagedBackend(layers, num_pages, config.page_size, dtype, device, num_window_pages, shared)


def _flashinfer_missing(
    layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device, page_size: int
) -> str | None:
    """Why FlashInfer cannot run this model here, judging without importing it; None: it may."""
    if not layers:
        return "the model has no attention"
    if device.type != "cuda" or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than compute capability 8.0"
    if importlib.util.find_spec("flashinfer") is None:
        return "it is not installed: pip install 'asyncengine[cuda]'"
    return why_not(layers, dtype, page_size)


def _try_flashinfer(
    config: EngineConfig, layers: Sequence[LayerSpec], num_pages: int, dtype: torch.dtype, device: torch.device,
    max_model_len: int | None,
) -> FlashInferBackend | str:  # fmt: skip
    """A backend whose kernels have all run once, or why there is none."""
    try:
        flashinfer = load_flashinfer()
    except Exception as error:  # it touches compilers, drivers and the home directory on import
        return f"importing flashinfer failed: {type(error).__name__}: {error}"
    longest = num_pages
    if max_model_len is not None:  # plus one page, since a step may be launched before a row's end is known
        longest = -(-max_model_len // config.page_size) + 1
        if not all(spec.windowed for spec in layers):  # with windows alone, rows free pages and may exceed the pool
            longest = min(num_pages, longest)
    backend = FlashInferBackend(
        layers, num_pages, config.page_size, dtype, device, max_rows=config.max_num_seqs, max_pages_per_row=longest,
        kv_dtype=kv_dtype(config.kv_cache_dtype, dtype), flashinfer=flashinfer,
    )  # fmt: skip
    logger.info("preparing FlashInfer's kernels; those not compiled on this machine before take minutes")
    try:
        backend.warm_up()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a missing compiler or kernel may raise any exception
        backend.close()
        return f"its kernels do not run: {type(error).__name__}: {error}"
    return backend
