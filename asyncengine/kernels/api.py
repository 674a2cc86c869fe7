"""The names that the other units take of kernels.

Each module behind them is imported when its name is first asked for: numba and Triton are slow to import and not
everywhere (`compiler_missing`, `triton_missing`), and `CompileAhead` is wanted before torch is there. Modules stand for
groups of functions that are used together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncengine.kernels import recording
    from asyncengine.kernels.cache_folder import cache_root
    from asyncengine.kernels.compile_ahead import CompileAhead, can_start, read_kept
    from asyncengine.kernels.cpu import (
        atomics,
        attention_fields,
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
    from asyncengine.kernels.cpu.causal_conv import SegmentPlaces, ShortConvKernel, convolve_segments
    from asyncengine.kernels.cpu.experts import LinearWeights
    from asyncengine.kernels.cpu.gated_delta import GatedDeltaKernel
    from asyncengine.kernels.cpu.paged_attention import PagedAttention
    from asyncengine.kernels.cpu.sampling import SamplerKernel
    from asyncengine.kernels.cpu.unpacking import unpack_blocks, unpack_floats
    from asyncengine.kernels.cpu.vectors import UNIT
    from asyncengine.kernels.cuda import operations as gpu
    from asyncengine.kernels.cuda import packed_matmul, row_numbers, triton_missing
    from asyncengine.kernels.cuda.row_sampler import RowSampler
    from asyncengine.kernels.elsewhere import elsewhere, watcher
    from asyncengine.kernels.recording import KernelList

_NAMES = {
    "": "recording",
    "cache_folder": "cache_root",
    "compile_ahead": "CompileAhead can_start read_kept",
    "cpu": "atomics attention_fields compiler_missing experts gemm_quantized lora mamba2 operations packed panel_form "
    "quantize quantized_panels routing team",
    "cpu.causal_conv": "SegmentPlaces ShortConvKernel convolve_segments",
    "cpu.gated_delta": "GatedDeltaKernel",
    "cpu.experts": "LinearWeights",
    "cpu.paged_attention": "PagedAttention",
    "cpu.sampling": "SamplerKernel",
    "cpu.unpacking": "unpack_blocks unpack_floats",
    "cpu.vectors": "UNIT",
    "cuda": "gpu packed_matmul row_numbers triton_missing",
    "cuda.row_sampler": "RowSampler",
    "elsewhere": "elsewhere watcher",
    "recording": "KernelList",
}
"""Names by the package or module that has them."""
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
_OTHERWISE = {"gpu": "operations"}
"""Names that are others at home."""

__all__ = [
    "UNIT", "CompileAhead", "GatedDeltaKernel", "KernelList", "LinearWeights", "PagedAttention", "RowSampler",
    "SamplerKernel", "SegmentPlaces", "ShortConvKernel", "atomics", "attention_fields", "cache_root", "can_start",
    "compiler_missing", "convolve_segments", "elsewhere", "experts", "gemm_quantized", "gpu", "lora", "mamba2",
    "operations", "packed", "packed_matmul", "panel_form", "quantize", "quantized_panels", "read_kept", "recording",
    "routing", "row_numbers", "team", "triton_missing", "unpack_blocks", "unpack_floats", "watcher",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    own = _OTHERWISE.get(name, name)
    home = __import__(f"asyncengine.kernels.{_HOMES[name]}".rstrip("."), fromlist=[own])
    found = globals()[name] = getattr(home, own)  # steps import some names anew: they are found at once from now on
    return found
