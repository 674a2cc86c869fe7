"""The names that the other units take of kernels.

Each module behind them is imported when its name is first asked for: numba and Triton are slow to import and not
everywhere (`compiler_missing`, `triton_missing`), and `CompileAhead` is wanted before torch is there. Modules stand for
groups of functions that are used together.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncengine.kernels import recording
    from asyncengine.kernels.cache_folder import cache_root
    from asyncengine.kernels.compile_ahead import CompileAhead, read_kept
    from asyncengine.kernels.compile_process import can_start
    from asyncengine.kernels.cpu import (
        attention_fields,
        barrier,
        compiler_missing,
        experts,
        gemm_quantized,
        lora,
        mamba2,
        operations,
        packed,
        panel_form,
        quantize,
        quantized_panels,
        routing,
        team,
    )
    from asyncengine.kernels.cpu.causal_conv import convolve_segments
    from asyncengine.kernels.cpu.compile_watcher import watcher
    from asyncengine.kernels.cpu.gated_delta import GatedDeltaKernel
    from asyncengine.kernels.cpu.linears import LinearWeights
    from asyncengine.kernels.cpu.paged_attention import PagedAttention
    from asyncengine.kernels.cpu.sampling import SamplerKernel
    from asyncengine.kernels.cpu.short_conv import ShortConvKernel
    from asyncengine.kernels.cpu.state_segments import SegmentPlaces
    from asyncengine.kernels.cpu.unpack_blocks import unpack_blocks
    from asyncengine.kernels.cpu.unpack_floats import unpack_floats
    from asyncengine.kernels.cpu.vectors import UNIT
    from asyncengine.kernels.cuda import operations as gpu
    from asyncengine.kernels.cuda import packed_matmul, row_numbers, triton_missing
    from asyncengine.kernels.cuda.row_sampler import RowSampler
    from asyncengine.kernels.elsewhere import elsewhere
    from asyncengine.kernels.listing import KernelList

_OBJECTS = {
    # compilation
    "CompileAhead": "compile_ahead",
    "read_kept": "compile_ahead",
    "KernelList": "listing",
    "elsewhere": "elsewhere",
    "watcher": "cpu.compile_watcher",
    "cache_root": "cache_folder",
    "can_start": "compile_process",
    # what there is here
    "compiler_missing": "cpu",
    "triton_missing": "cuda",
    "UNIT": "cpu.vectors",
    # products
    "LinearWeights": "cpu.linears",
    "unpack_blocks": "cpu.unpack_blocks",
    "unpack_floats": "cpu.unpack_floats",
    # attention, recurrences, sampling
    "PagedAttention": "cpu.paged_attention",
    "SegmentPlaces": "cpu.state_segments",
    "convolve_segments": "cpu.causal_conv",
    "GatedDeltaKernel": "cpu.gated_delta",
    "ShortConvKernel": "cpu.short_conv",
    "SamplerKernel": "cpu.sampling",
    "RowSampler": "cuda.row_sampler",
}
_MODULES = {
    # products
    "packed": "cpu.packed",
    "gemm_quantized": "cpu.gemm_quantized",
    "quantized_panels": "cpu.quantized_panels",
    "quantize": "cpu.quantize",
    "panel_form": "cpu.panel_form",
    "packed_matmul": "cuda.packed_matmul",
    "experts": "cpu.experts",
    "routing": "cpu.routing",
    # layers between products
    "operations": "cpu.operations",
    "gpu": "cuda.operations",
    "attention_fields": "cpu.attention_fields",
    "mamba2": "cpu.mamba2",
    "lora": "cpu.lora",
    "row_numbers": "cuda.row_numbers",
    # recording, and teams of threads
    "recording": "recording",
    "team": "cpu.team",
    "barrier": "cpu.barrier",
}

__all__ = [
    "UNIT", "CompileAhead", "GatedDeltaKernel", "KernelList", "LinearWeights", "PagedAttention", "RowSampler",
    "SamplerKernel", "SegmentPlaces", "ShortConvKernel", "attention_fields", "barrier", "cache_root", "can_start",
    "compiler_missing", "convolve_segments", "elsewhere", "experts", "gemm_quantized", "gpu", "lora", "mamba2",
    "operations", "packed", "packed_matmul", "panel_form", "quantize", "quantized_panels", "read_kept", "recording",
    "routing", "row_numbers", "team", "triton_missing", "unpack_blocks", "unpack_floats", "watcher",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found: Any = import_module(f"asyncengine.kernels.{_MODULES[name]}")
    elif name in _OBJECTS:
        found = getattr(import_module(f"asyncengine.kernels.{_OBJECTS[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found  # steps import some names anew: they are found without this function from now on
    return found
