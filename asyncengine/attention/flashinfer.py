"""Paged attention by FlashInfer's kernels (Ye et al. 2025) on an NVIDIA GPU.

Steps with more than one token in a row go through the prefill wrapper, steps of one token per row through the decode
wrapper. Per group of equal layers there is one wrapper of each kind, planned once a step; for each CUDA graph size
there is one more decode wrapper that keeps to fixed buffers.

Three things must hold and are easily broken:

* A plan gets its row arrays in host memory. Given device arrays it would read them back and wait for the device.
* A plan fills pinned memory of its wrapper and queues a copy of it. Planning again before that copy ran would change
  the step that is still waiting; an event behind each plan is waited for before the next one.
* All work of an engine is queued in one stream. The workspaces and the arrays of the graphs are shared on that ground.

Layers that attend to chunks (Llama 4) get arrays of their own, of a step whose rows are cut where chunks end
(`flashinfer_plan.in_chunks`); keys and values are written by the arrays of the whole step.

Pool layout: per layer one tensor [pages, 2, page_size, kv heads, head dim], keys at 0 and values at 1. Kernels read
no token that was not written, so pages are not cleared.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from asyncengine.attention.base import LayerSpec, StepView, page_bytes
from asyncengine.attention.flashinfer_plan import (
    DeviceArrays,
    HostArrays,
    LayerGroup,
    float_workspace_bytes,
    graph_int_workspace_bytes,
    in_chunks,
    pack_step,
    uploaded_size,
)
from asyncengine.device.pinned import CudaMemory, DeviceMemory

_LARGEST_FP8 = 448.0
"""Of float8_e4m3fn. torch turns larger values into NaN instead of saturating."""


def load_flashinfer() -> Any:
    """The `flashinfer` module. Slow, and it may fail in many ways: it writes to the home directory, for one.

    It compiles by running `ninja`, which it depends on, and which lies beside this Python's own program: a folder that
    is not on the path of somebody who has not activated the environment. It is put at the path's end then.
    """
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts) is not None:
        os.environ["PATH"] = os.pathsep.join(part for part in (os.environ.get("PATH"), scripts) if part)
    return importlib.import_module("flashinfer")


class _Planned:
    """A FlashInfer wrapper that is not planned again before the copy its last plan queued has run."""

    def __init__(self, wrapper: Any, memory: DeviceMemory) -> None:
        self._wrapper = wrapper
        self._event = memory.event()
        self._queued = False
        self.run = wrapper.run

    def plan(self, *arrays: torch.Tensor | int, **options: Any) -> None:
        if self._queued:
            self._event.synchronize()
        self._wrapper.plan(*arrays, **options)
        self._event.record()
        self._queued = True


@dataclass(frozen=True, slots=True, eq=False)
class _Fixed:
    """Arrays that stay where they are."""

    memory: torch.Tensor
    arrays: DeviceArrays


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGraph:
    """What the CUDA graph of one number of decode rows reads: the same addresses at every replay."""

    fixed: dict[int | None, _Fixed]
    """By chunk."""
    wrappers: dict[LayerGroup, _Planned]


class FlashInferBackend:
    """`AttentionBackend` on FlashInfer. `num_pages` includes page 0, which belongs to padding rows.

    `max_rows` rows at most in a step, `max_pages_per_row` pages at most in a row. Key and value sizes are equal in
    each layer and there are no sinks (`flashinfer_plan.why_not`). KV memory is of type `kv_dtype`: `dtype`, or
    float8_e4m3fn with scale 1.
    """

    name = "flashinfer"
    graphs = True

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_rows: int,
        max_pages_per_row: int,
        kv_dtype: torch.dtype | None = None,
        flashinfer: Any = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._kv_dtype = kv_dtype or dtype
        self.kv_bytes = num_pages * page_bytes(layers, page_size, self._kv_dtype)
        self._dtype = dtype
        self._flashinfer = flashinfer or load_flashinfer()
        self._memory = memory or CudaMemory(device)
        self._max_pages_per_row = max_pages_per_row
        self._group_of = [LayerGroup.of(spec) for spec in layers]
        self._groups = list(dict.fromkeys(self._group_of))
        self._chunks = list(dict.fromkeys((None, *(group.chunk for group in self._groups))))
        with torch.inference_mode(False):  # written in place later, inside of inference mode and outside
            self._pools = [self._pool(spec, device) for spec in layers]
            size = float_workspace_bytes(self._groups, max_rows, self._memory.processors())
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self._prefill = {group: self._prefill_wrapper() for group in self._groups}
        self._decode = {group: self._decode_wrapper(group) for group in self._groups}
        self._graphs: dict[int, _DecodeGraph] = {}
        self._graph_memory: dict[int | None, torch.Tensor] = {}
        self._wrappers: dict[LayerGroup, _Planned] = {}
        self._arrays: DeviceArrays | None = None

    # -- before the forward, on the host -------------------------------------------------------------------------

    def prepare_graph(self, size: int) -> None:
        if size in self._graphs:
            return
        with torch.inference_mode(False):
            fixed = {chunk: self._fixed(size, chunk) for chunk in self._chunks}
            wrappers = {group: self._graph_wrapper(group, size, fixed[group.chunk].arrays) for group in self._groups}
        self._graphs[size] = _DecodeGraph(fixed, wrappers)

    def _fixed(self, size: int, chunk: int | None) -> _Fixed:
        """One memory for all sizes: graphs run one after another. A larger size than the first gets a new one; those
        captured before keep theirs."""
        pages = self._max_pages_per_row if chunk is None else min(self._max_pages_per_row, chunk // self.page_size)
        need = uploaded_size(size, size, size * pages)
        memory = self._graph_memory.get(chunk)
        if memory is None or memory.numel() < need:
            self._graph_memory[chunk] = memory = self._memory.reserve(need)
        return _Fixed(memory, DeviceArrays.over(memory, size, size))

    def plan(self, step: StepView) -> None:
        rows, tokens = len(step.counts), int(step.qo_indptr[-1])
        decode = rows == tokens
        if step.graph is not None and (rows != step.graph or not decode):
            raise ValueError(f"a decode graph of {step.graph} rows cannot run {rows} rows of {tokens} tokens")
        graph = None if step.graph is None else self._graphs[step.graph]
        wrappers = self._decode if decode else self._prefill
        if graph is not None:
            wrappers = graph.wrappers
        for chunk in self._chunks:
            host = pack_step(in_chunks(step, chunk, self.page_size), self.page_size, self._memory.host)
            arrays = self._uploaded(host, tokens, None if graph is None else graph.fixed[chunk])
            pages = arrays.kv_indices[: host.num_pages]
            for group, wrapper in wrappers.items():
                if group.chunk == chunk:
                    plan = self._plan_decode if decode else self._plan_prefill
                    plan(group, wrapper, host, pages)
            if chunk is None:
                self._arrays = arrays
        self._wrappers = wrappers

    def _uploaded(self, host: HostArrays, tokens: int, fixed: _Fixed | None) -> DeviceArrays:
        if fixed is None:
            return DeviceArrays.over(self._memory.upload(host.uploaded), len(host.seq_lens), tokens)
        self._memory.upload(host.uploaded, into=fixed.memory)
        return fixed.arrays

    def warm_up(self) -> None:
        """Run each kernel once on page 0 and wait: compiles what is not compiled yet, and shows what cannot run."""
        for count in (2, 1):
            ends = np.array([count], dtype=np.int64)
            table = np.zeros((1, -(-count // self.page_size)), dtype=np.int32)
            slots = torch.empty(0, dtype=torch.int64)
            self.plan(StepView(np.zeros_like(ends), ends, np.array([0, count], dtype=np.int64), table, slots))
            for group in self._groups:
                layer = self._group_of.index(group)
                zeros = torch.zeros(
                    (count, group.num_heads, group.head_dim), dtype=self._dtype, device=self._memory.device
                )
                self.write(layer, zeros[:, : group.num_kv_heads], zeros[:, : group.num_kv_heads])
                self.attend(layer, zeros)
        done = self._memory.event()
        done.record()
        done.synchronize()

    def close(self) -> None:
        self._pools = []
        self._wrappers, self._prefill, self._decode, self._graphs = {}, {}, {}, {}
        self._arrays, self._graph_memory = None, {}
        self._workspace = torch.empty(0, dtype=torch.uint8)

    # -- in the forward, on the device ---------------------------------------------------------------------------

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        arrays = self._arrays
        assert arrays is not None, "plan comes first"
        self._flashinfer.append_paged_kv_cache(
            self._stored(key),
            self._stored(value),
            arrays.batch_indices,
            arrays.positions,
            self._pools[layer],
            arrays.kv_indices,
            arrays.kv_indptr,
            arrays.last_page_len,
            kv_layout="NHD",
        )

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._wrappers[self._group_of[layer]].run(_rows_dense(query), self._pools[layer])
        return out

    def _stored(self, values: torch.Tensor) -> torch.Tensor:
        if self._kv_dtype != self._dtype:
            return values.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(self._kv_dtype)
        return _rows_dense(values)

    # -- plans and wrappers --------------------------------------------------------------------------------------

    def _plan_decode(self, group: LayerGroup, wrapper: _Planned, host: HostArrays, pages: torch.Tensor) -> None:
        wrapper.plan(
            host.kv_indptr,
            pages,
            host.last_page_len,
            group.num_heads,
            group.num_kv_heads,
            group.head_dim,
            self.page_size,
            seq_lens=host.seq_lens,
            **self._options(group),
        )

    def _plan_prefill(self, group: LayerGroup, wrapper: _Planned, host: HostArrays, pages: torch.Tensor) -> None:
        wrapper.plan(
            host.qo_indptr,
            host.kv_indptr,
            pages,
            host.last_page_len,
            group.num_heads,
            group.num_kv_heads,
            group.head_dim,
            self.page_size,
            causal=True,
            seq_lens=host.seq_lens,
            # else releases before 0.7.2 find it by a loop over the rows, as they do the most keys, here and for decodes
            # on tensor cores: half a millisecond at 256 rows for each group of layers. max_sequence_kv would spare that
            # here, but is broken in 0.6
            max_token_per_sequence=host.longest_query,
            **self._options(group),
        )

    def _options(self, group: LayerGroup) -> dict[str, Any]:
        return {
            "pos_encoding_mode": "NONE",
            "window_left": group.window_left,
            "logits_soft_cap": group.softcap,
            "sm_scale": group.scale,
            "q_data_type": self._dtype,
            "kv_data_type": self._kv_dtype,
            "o_data_type": self._dtype,
            "non_blocking": True,
        }

    def _prefill_wrapper(self) -> _Planned:
        make = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        return _Planned(make(self._workspace, kv_layout="NHD", backend="fa2"), self._memory)

    def _decode_wrapper(self, group: LayerGroup) -> _Planned:
        make = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
        wrapper = make(self._workspace, kv_layout="NHD", use_tensor_cores=group.decodes_on_tensor_cores, backend="fa2")
        return _Planned(wrapper, self._memory)

    def _graph_wrapper(self, group: LayerGroup, size: int, arrays: DeviceArrays) -> _Planned:
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            kv_layout="NHD",
            use_cuda_graph=True,
            use_tensor_cores=group.decodes_on_tensor_cores,
            paged_kv_indptr_buffer=arrays.kv_indptr,
            paged_kv_indices_buffer=arrays.kv_indices,
            paged_kv_last_page_len_buffer=arrays.last_page_len,
            backend="fa2",
        )
        count = graph_int_workspace_bytes(size, group.heads_per_kv_head, self._memory.processors())
        small = torch.empty(count, dtype=torch.uint8, device=self._memory.device)
        wrapper.reset_workspace_buffer(self._workspace, small)
        return _Planned(wrapper, self._memory)

    def _pool(self, spec: LayerSpec, device: torch.device) -> torch.Tensor:
        shape = (self.num_pages, 2, self.page_size, spec.num_kv_heads, spec.key_dim)
        memory = torch.empty(shape, dtype=self._kv_dtype, device=device)
        memory[0].view(torch.uint8).zero_()
        return memory


def _rows_dense(values: torch.Tensor) -> torch.Tensor:
    """Kernels take any stride between tokens and heads, but none within a head."""
    return values if values.stride(-1) == 1 else values.contiguous()
