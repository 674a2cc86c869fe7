"""Demands of FlashInfer 0.6.13 to 0.7.2 on the tensors it is given, read from its sources.

Each check names the file it comes from, relative to the package (`csrc` and `include` lie in its `data`). Where the
library refuses, the same kind of error is raised: `RuntimeError` from its bindings, `ValueError` from its Python. Where
it does not look but its kernels would read garbage or fault, an assertion fails.

Memory is host memory here, so that alignment is told from where a tensor begins in its storage: torch's allocations on
a GPU begin at multiples of 512 bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

VECTOR = 16
"""Bytes that a kernel loads at once."""
HALVES = (torch.float16, torch.bfloat16)
IsHost = Callable[[torch.Tensor], bool]
"""Predicate that a tensor lies in host memory, as far as the stand-in knows."""


def refuse(wrong: bool, message: str) -> None:
    """TVM_FFI_ICHECK (csrc/tvm_ffi_utils.h)."""
    if wrong:
        raise RuntimeError(message)


def refuse_empty(kernel: str, *tensors: torch.Tensor) -> None:
    """Kernels launch as many blocks as there are rows, and CUDA launches none of no blocks."""
    refuse(any(not tensor.numel() for tensor in tensors), f"{kernel} failed with error code invalid argument")


def check_input(name: str, tensor: torch.Tensor, dims: int, on_host: IsHost) -> None:
    """CHECK_LAST_DIM_CONTIGUOUS_INPUT and CHECK_DIM (csrc/tvm_ffi_utils.h)."""
    refuse(on_host(tensor), f"{name} must be a CUDA tensor")
    refuse(tensor.dim() != dims, f"{name} must be a {dims}D tensor")
    refuse(tensor.stride(-1) != 1, f"{name} must be contiguous at last dimension")


def check_whole(name: str, tensor: torch.Tensor, dims: int, on_host: IsHost) -> None:
    """CHECK_INPUT and CHECK_DIM (csrc/tvm_ffi_utils.h)."""
    check_input(name, tensor, dims, on_host)
    refuse(not tensor.is_contiguous(), f"{name} must be contiguous")


def aligned(tensor: torch.Tensor, bytes_: int = VECTOR, *, rows: int = VECTOR) -> None:
    """It begins at a multiple of so many bytes, and so do its rows: else CUDA reports a misaligned address."""
    size = tensor.dtype.itemsize
    assert tensor.storage_offset() * size % bytes_ == 0, "begins between two vectors"
    for extent, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        assert extent == 1 or stride * size % rows == 0, "a row begins between two vectors"


def check_gated(name: str, both: torch.Tensor, on_host: IsHost, dtypes: tuple[torch.dtype, ...] = HALVES) -> None:
    """`silu_and_mul` and its like: activation.py, jit/activation.py, include/flashinfer/activation.cuh."""
    refuse_empty(name, both)
    size = both.dtype.itemsize
    if both.shape[-1] * size % VECTOR != 0:
        raise ValueError("The pointers must be multiple of 16 bytes.")
    refuse(both.dtype not in dtypes, f"failed to dispatch data type {both.dtype}")
    refuse(both.shape[-1] // 2 < VECTOR // size, "Failed to launch kernel: invalid configuration argument")
    assert not on_host(both), "not looked at"
    assert both.is_contiguous(), "it counts on through memory"
    assert both.shape[-1] // 2 * size % VECTOR == 0, "the second half begins between two vectors"
    aligned(both)


def check_append(
    key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, arrays: dict[str, torch.Tensor], on_host: IsHost
) -> None:
    """`append_paged_kv_cache`: page.py, csrc/page.cu, include/flashinfer/page.cuh. `arrays`: its index arrays by their
    names, `kv_indptr` and `kv_last_page_len` among them."""
    refuse_empty("AppendPagedKVCache", key, value)
    for name, array in arrays.items():
        check_whole(name, array, 1, on_host)
        assert array.dtype == torch.int32, "read as int32"
    assert cache.dim() == 5, "taken apart at its second dimension"
    assert cache.shape[1] == 2
    check_input("paged_k_cache", cache[:, 0], 4, on_host)
    refuse(len(arrays["kv_indptr"]) != len(arrays["kv_last_page_len"]) + 1, "kv_indptr.size(0) == batch_size + 1")
    for name in ("batch_indices", "positions"):
        refuse(len(arrays[name]) != len(key), f"{name}.size(0) == nnz")
    for name, part in (("append_key", key), ("append_value", value)):
        refuse(part.dim() != 3, f"{name} must be a 3D tensor")
        refuse(part.stride(-1) != 1, f"{name} must be contiguous at last dimension")
        refuse(part.shape[1:] != cache.shape[3:], f"{name}.size(1) == num_heads, {name}.size(2) == head_dim")
        refuse(on_host(part), f"{name}.device() == append_key.device()")
        assert part.shape[0] == key.shape[0], "as many values as keys"
        assert part.dtype == cache.dtype, "the kernel would read the bytes of one type as another"
        aligned(part)
    refuse(cache.shape[-1] not in (64, 128, 256, 512), f"Unsupported head_dim: {cache.shape[-1]}")


def check_workspace(name: str, buffer: torch.Tensor, on_host: IsHost) -> None:
    """utils.py of 0.6.18 and later; before, the kernels took what they got."""
    if buffer.data_ptr() % VECTOR:
        raise ValueError(f"{name} must be 16-byte aligned")
    assert not on_host(buffer), "partial results lie on the device"
    assert buffer.dtype == torch.uint8, "its elements are counted as bytes"


def check_queries(q: torch.Tensor, cache: torch.Tensor, planned: dict[str, object], on_host: IsHost) -> None:
    """`run` of both wrappers: utils.py, decode.py, prefill.py; csrc/batch_decode.cu and batch_prefill.cu."""
    refuse_empty("BatchAttentionWithPagedKVCache", q)
    if q.dtype != planned["q_data_type"]:
        raise ValueError(f"The dtype of q {q.dtype} does not match the q_data_type specified in plan function.")
    if cache.dtype != planned["kv_data_type"]:
        raise ValueError(f"The dtype of k {cache.dtype} does not match the kv_data_type specified in plan function.")
    assert not on_host(q), "not looked at"
    assert not on_host(cache), "not looked at"
    assert q.dim() == 3
    assert q.stride(-1) == 1, "it counts on through a head"
    aligned(q)


def check_out(out: torch.Tensor, q: torch.Tensor, planned: dict[str, object], on_host: IsHost) -> None:
    """`out` of both wrappers' `run`: `check_shape_dtype_device` (utils.py), which decode.py and prefill.py call;
    csrc/batch_decode.cu and batch_prefill.cu pass on its address and no strides."""
    if out.shape != q.shape:
        raise ValueError(f"Invalid shape of out: expected {q.shape}, got {out.shape}")
    if out.dtype != planned["o_data_type"]:
        raise ValueError(f"Invalid dtype of out: expected {planned['o_data_type']}, got {out.dtype}")
    if on_host(out):
        raise ValueError("Invalid device of out")
    assert out.is_contiguous(), "it counts on through memory"
    aligned(out)
