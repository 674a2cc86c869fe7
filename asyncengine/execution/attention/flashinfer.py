"""Paged attention by FlashInfer's kernels (Ye et al. 2025) on an NVIDIA GPU.

Steps with more than one token in a row go through the prefill wrapper, steps of one token per row through the decode
wrapper. Per group of equal layers there is one wrapper of each kind, planned once a step; for each CUDA graph size
there is one more decode wrapper that keeps to fixed buffers.

Three things must hold and are easily broken:

* A plan gets its row arrays in host memory. Given device arrays it would read them back and wait for the device.
* A plan fills pinned memory of its wrapper and queues a copy of it. Planning again before that copy ran would change
  the step that is still waiting; an event behind each plan is waited for before the next one.
* All work of an engine is queued in one stream. The workspaces and the arrays of the graphs are shared on that ground.

Steps of long prompts go through a third wrapper where a Hopper GPU has faster kernels for them (`LayerGroup.hopper`).

Layers that attend to chunks (Llama 4) get arrays of their own, of a step whose rows are cut where chunks end
(`flashinfer_plan.in_chunks`); keys and values are written by the arrays of the whole step.

Pool layout: per layer one tensor [pages, 2, page_size, kv heads, head dim], keys at 0 and values at 1. Kernels read
no token that was not written, so pages are not cleared.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from asyncengine.execution.attention.base import AttentionBackend, LayerSpec, MergedHeads, StepView, page_bytes
from asyncengine.execution.attention.flashinfer_plan import (
    LONG,
    DeviceArrays,
    HostArrays,
    LayerGroup,
    float_workspace_bytes,
    graph_int_workspace_bytes,
    host_only,
    in_chunks,
    pack_step,
    uploaded_size,
)
from asyncengine.execution.device.transfer import CudaMemory, Int32Array
from asyncengine.kernels.api import triton_missing

logger = logging.getLogger("asyncengine")

_LOG2E = math.log2(math.e)
_LARGEST_FP8 = 448.0
"""The largest number of float8_e4m3fn. torch turns larger values into NaN instead of saturating."""


def load_flashinfer() -> Any:
    """Import the `flashinfer` module. It is slow, and may fail in many ways: it writes to the home directory, for one.

    It compiles by running `ninja`, which is installed beside this Python's executable. If the environment is not
    activated, that folder is not on PATH, and is appended to it.
    """
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts) is not None:
        os.environ["PATH"] = os.pathsep.join(folder for folder in (os.environ.get("PATH"), scripts) if folder)
    return importlib.import_module("flashinfer")


class _Planned:
    """A FlashInfer wrapper that is not planned again before the copy its last plan queued has run.

    In a CUDA graph it is planned only when a row's number of pages changes, which is all that its plan depends on: a
    single row needs a plan once per page.
    """

    def __init__(self, wrapper: Any, memory: CudaMemory, again: Any = None) -> None:
        """`again`: in a graph, `flashinfer.fast_decode_plan`, for plans after the first: it fills no device buffers."""
        self.wrapper, self._again = wrapper, again
        self._event = memory.event()
        self._divided: bytes | None = None
        """The row pointers of the last plan."""
        self.run = wrapper.run

    def stands(self, divided: bytes) -> bool:
        """Whether the last plan is valid for these row pointers."""
        return self._again is not None and divided == self._divided

    def plan(self, divided: bytes, *arrays: torch.Tensor | int, **options: Any) -> None:
        if self._divided is not None:
            self._event.synchronize()
        if self._again is None or self._divided is None:  # the first plan chooses the kernel, which `again` needs
            self.wrapper.plan(*arrays, **options)
        else:
            options = {name: value for name, value in options.items() if name not in ("seq_lens", "o_data_type")}
            self._again(self.wrapper, *arrays, global_override_indptr_cpu=arrays[0], **options)
        self._event.record()
        self._divided = divided


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeGraph:
    """The inputs of the CUDA graph of one number of decode rows: the same addresses at every replay."""

    arrays: dict[int | None, tuple[int, DeviceArrays]]
    """Chunk length -> (offset of its arrays in the graph's inputs, the arrays). Those of whole rows (None) are last, so
    that their unused end need not be sent."""
    wrappers: dict[LayerGroup, _Planned]
    growing: list[int]
    """Offsets of the arrays whose numbers grow by one from step to step."""


class FlashInferBackend(AttentionBackend):
    """On FlashInfer. `num_pages` includes page 0, which belongs to padding rows.

    `max_rows` rows at most in a step, `max_pages_per_row` pages at most in a row. Key and value sizes are equal in
    each layer (`flashinfer_plan.why_not`). KV memory is of type `kv_dtype`: `dtype`, or float8_e4m3fn with scale 1.
    """

    name = "flashinfer"
    graphs = True

    def __init__(
        self, layers: Sequence[LayerSpec], num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device, *,
        max_rows: int, max_pages_per_row: int, kv_dtype: torch.dtype | None = None, flashinfer: Any = None,
        memory: CudaMemory | None = None,
    ) -> None:  # fmt: skip
        self.num_pages = num_pages
        self.page_size = page_size
        self._kv_dtype = kv_dtype or dtype
        self.kv_bytes = num_pages * page_bytes(layers, page_size, self._kv_dtype)
        self._dtype = dtype
        self._flashinfer = flashinfer or load_flashinfer()
        self.memory = memory or CudaMemory(device)
        self._max_pages_per_row = max_pages_per_row
        self._group_of = [LayerGroup.of(spec) for spec in layers]
        self._sinks = [spec.sinks for spec in layers]
        self._groups = list(dict.fromkeys(self._group_of))
        self._chunks = list(dict.fromkeys((None, *(group.chunk for group in self._groups))))
        with torch.inference_mode(False):  # written in place later, inside of inference mode and outside
            self.pools = [self._pool(spec, device) for spec in layers]
            size = float_workspace_bytes(self._groups, max_rows, self.memory.processors())
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self._prefill = {group: self._prefill_wrapper("fa2") for group in self._groups}
        self._long = self._prefill
        """The wrappers of long prompts (`_is_long`); the same as `_prefill` if nothing is faster."""
        self._processors = self.memory.processors()
        faster = [group for group in self._groups if group.hopper(dtype, self._kv_dtype)]
        if faster and self.memory.hopper():
            self._long = self._prefill | {group: self._prefill_wrapper("fa3") for group in faster}
        self._decode = {group: self._decode_wrapper(group) for group in self._groups}
        self.decode_graphs: dict[int, _DecodeGraph] = {}
        self._wrappers: dict[LayerGroup, _Planned] = {}
        self._arrays: DeviceArrays | None = None
        self.kv_slots = torch.empty(0, dtype=torch.int64)
        self.attend_merged: Callable[..., torch.Tensor] | None = None
        """Norms, rotation, `write` and `attend`, as of `CompiledBackend`; None: there is no kernel."""
        if triton_missing(device) is None:
            from asyncengine.kernels.api import gpu

            self._prepare_and_write, self.attend_merged = gpu.prepare_and_write, self._attend_merged
        self._cut: Callable[[int, torch.Tensor], torch.Tensor] | None = None

    # -- before the forward, on the host -------------------------------------------------------------------------

    def plan(self, step: StepView) -> None:
        self.kv_slots = step.kv_slots
        decode = len(step.counts) == int(step.qo_indptr[-1])
        self._wrappers = self._decode if decode else self._long if self._is_long(step) else self._prefill
        for chunk in reversed(self._chunks):
            packed = pack_step(in_chunks(step, chunk, self.page_size), self.page_size, self.memory.host)
            rows, tokens = packed.sizes[1], packed.sizes[4]
            self._arrays = DeviceArrays.over(self.memory.upload(packed.uploaded), rows, tokens)
            self._plan_groups(chunk, packed, decode)

    def _is_long(self, step: StepView) -> bool:
        """Whether the kernels for long prompts are faster here. They divide queries among processors, not keys, and so
        need many queries, or keys that are few."""
        rows, tokens = len(step.counts), int(step.qo_indptr[-1])
        tiles = tokens // LONG * min((group.num_heads for group in self._groups), default=0)
        return tokens >= LONG * rows and (2 * tiles >= self._processors or int(step.starts.sum()) <= tokens)

    def plan_graph(self, step: StepView, host: torch.Tensor) -> int:
        """`plan` for the graph of as many rows. Padding rows are ordinary rows of start 0 and page table [0]. `host`: a
        pinned array as large as the graph's inputs. Returns how many of its elements are to be copied to these."""
        used, graph = 0, self.decode_graphs[len(step.counts)]
        self._wrappers, self.kv_slots = graph.wrappers, step.kv_slots
        for chunk, (begin, self._arrays) in graph.arrays.items():
            at = partial(host.narrow, 0, begin)
            packed = pack_step(in_chunks(step, chunk, self.page_size), self.page_size, at)
            self._plan_groups(chunk, packed, True)
            used = begin + packed.memory.numel()
        return used

    def advance_graph(self, size: int, rows: int, host: Int32Array) -> None:
        """Turn the inputs that `plan_graph` put into `host` into those of the next step, whose first `rows` rows are
        one position further on the same pages. The plans stay valid."""
        for begin in self.decode_graphs[size].growing:
            host[begin : begin + rows] += 1

    def graph_inputs(self, size: int) -> int:
        """The most int32 elements of inputs of a graph of `size` decode rows."""
        return sum(self._input_size(size, chunk) for chunk in self._chunks)

    def _input_size(self, size: int, chunk: int | None) -> int:
        pages = self._max_pages_per_row if chunk is None else min(self._max_pages_per_row, chunk // self.page_size)
        return -(-(host_only(size) + uploaded_size(size, size, size * pages)) // 4) * 4

    def prepare_graph(self, size: int, inputs: torch.Tensor) -> None:
        """Make the wrappers of a graph before it is captured. It reads `inputs`, int32 on the device, aligned to 16
        bytes; other graphs may read the same memory."""
        arrays, growing, begin = {}, [], 0
        with torch.inference_mode(False):
            for chunk in reversed(self._chunks):
                views = DeviceArrays.over(inputs[begin + host_only(size) :], size, size)
                arrays[chunk] = begin, views
                front = int(inputs.storage_offset())
                growing += [int(array.storage_offset()) - front for array in (views.last_page_len, views.positions)]
                begin += self._input_size(size, chunk)
            wrappers = {group: self._graph_wrapper(group, size, arrays[group.chunk][1]) for group in self._groups}
        self.decode_graphs[size] = _DecodeGraph(arrays, wrappers, growing)

    def warm_up(self) -> None:
        """Run each kernel once on page 0, and wait: kernels are compiled, and errors show. If kernels for long prompts
        fail, the ordinary ones take their prompts."""
        if self._long is not self._prefill:
            try:
                self._warm_up(LONG)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a missing or outdated compiler may raise any exception
                logger.warning("long prompts do without FlashAttention-3's kernels: %s", error)
                self._long = self._prefill
        self._warm_up(2)
        self._warm_up(1)
        done = self.memory.event()
        done.record()
        done.synchronize()

    def _warm_up(self, count: int) -> None:
        """Run a step of one row of `count` tokens."""
        ends = np.array([count], dtype=np.int64)
        table = np.zeros((1, -(-count // self.page_size)), dtype=np.int32)
        slots = torch.empty(0, dtype=torch.int64)
        self.plan(StepView(np.zeros_like(ends), ends, np.array([0, count], dtype=np.int64), table, slots))
        for group in self._groups:
            layer = self._group_of.index(group)
            zeros = torch.zeros((count, group.num_heads, group.head_dim), dtype=self._dtype, device=self.memory.device)
            self.write(layer, zeros[:, : group.num_kv_heads], zeros[:, : group.num_kv_heads])
            self.attend(layer, zeros)

    def close(self) -> None:
        self.pools = []
        self._wrappers, self._prefill, self._long, self._decode, self.decode_graphs = {}, {}, {}, {}, {}
        self._arrays = None
        self._workspace = torch.empty(0, dtype=torch.uint8)

    # -- in the forward, on the device ---------------------------------------------------------------------------

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        arrays = self._arrays
        assert arrays is not None, "plan comes first"
        self._flashinfer.append_paged_kv_cache(
            self._stored(key), self._stored(value), arrays.batch_indices, arrays.positions, self.pools[layer],
            arrays.kv_indices, arrays.kv_indptr, arrays.last_page_len, kv_layout="NHD",
        )  # fmt: skip

    def attend(self, layer: int, query: torch.Tensor) -> torch.Tensor:
        if self._cut is not None:
            return self._cut(layer, query)
        return self._run(layer, _rows_dense(query))

    def _attend_merged(
        self, layer: int, qkv: torch.Tensor, heads: MergedHeads, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        query = self._prepare_and_write(qkv, heads, cos, sin, self.kv_slots, self.pools[layer])
        return self.attend(layer, query).view(len(qkv), -1)

    def attend_into(self, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        """The same as `attend`, into `out` of the same shape as `query`."""
        self._run(layer, query, out)

    def _run(self, layer: int, query: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Run the kernel. A sink is one more term of the softmax's denominator, whose base-2 logarithm the kernel
        returns: results are scaled by denominator / (denominator + exp(sink))."""
        run, pool, sinks = self._wrappers[self._group_of[layer]].run, self.pools[layer], self._sinks[layer]
        if sinks is None:
            return run(query, pool, out=out)
        attended, logs = run(query, pool, out=out, return_lse=True)
        return attended.mul_(torch.sub(logs, sinks, alpha=_LOG2E).mul_(1 / _LOG2E).sigmoid_().unsqueeze(-1))

    @contextmanager
    def cut_at(self, cut: Callable[[int, torch.Tensor], torch.Tensor], kv_slots: torch.Tensor) -> Iterator[None]:
        """Context in which `cut(layer, query [T, heads, key dim])` is called instead of attention, and returns its
        result. Keys and values are written by `kv_slots`, int64 [T] at a fixed device address."""
        self._cut, self.kv_slots = cut, kv_slots
        try:
            yield
        finally:
            self._cut = None

    def _stored(self, values: torch.Tensor) -> torch.Tensor:
        if self._kv_dtype != self._dtype:
            return values.clamp(-_LARGEST_FP8, _LARGEST_FP8).to(self._kv_dtype)
        return _rows_dense(values)

    # -- plans and wrappers --------------------------------------------------------------------------------------

    def _plan_groups(self, chunk: int | None, host: HostArrays, decode: bool) -> None:
        """Plan for the layers of chunk length `chunk`. `host`: the arrays that were sent to the device."""
        assert self._arrays is not None
        for group, wrapper in self._wrappers.items():
            if group.chunk != chunk or wrapper.stands(host.divided):
                continue
            begins, lens, pages, last = host.for_plans()
            arrays: tuple[torch.Tensor, ...] = (pages, self._arrays.kv_indices[: host.num_pages], last)
            extra: dict[str, Any] = {}
            if not decode:
                arrays = (begins, *arrays)
                # without max_token_per_sequence, releases before 0.7.2 compute it by a Python loop over the rows, half
                # a millisecond at 256 rows for each group of layers. They do the same for the most keys, here and for
                # decodes on tensor cores; max_sequence_kv would spare that here, but is broken in 0.6
                extra = {"causal": True, "max_token_per_sequence": host.longest_query}
            wrapper.plan(
                host.divided, *arrays, group.num_heads, group.num_kv_heads, group.head_dim, self.page_size,
                seq_lens=lens, pos_encoding_mode="NONE", window_left=group.window_left, logits_soft_cap=group.softcap,
                sm_scale=group.scale, q_data_type=self._dtype, kv_data_type=self._kv_dtype, o_data_type=self._dtype,
                non_blocking=True, **extra,
            )  # fmt: skip

    def _prefill_wrapper(self, backend: str) -> _Planned:
        make = self._flashinfer.BatchPrefillWithPagedKVCacheWrapper
        return _Planned(make(self._workspace, kv_layout="NHD", backend=backend), self.memory)

    def _decode_wrapper(self, group: LayerGroup) -> _Planned:
        make = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper
        wrapper = make(self._workspace, kv_layout="NHD", use_tensor_cores=group.decodes_on_tensor_cores, backend="fa2")
        return _Planned(wrapper, self.memory)

    def _graph_wrapper(self, group: LayerGroup, size: int, arrays: DeviceArrays) -> _Planned:
        wrapper = self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, kv_layout="NHD", use_cuda_graph=True, use_tensor_cores=group.decodes_on_tensor_cores,
            paged_kv_indptr_buffer=arrays.kv_indptr, paged_kv_indices_buffer=arrays.kv_indices,
            paged_kv_last_page_len_buffer=arrays.last_page_len, backend="fa2",
        )  # fmt: skip
        count = graph_int_workspace_bytes(size, group.heads_per_kv_head, self.memory.processors())
        small = torch.empty(count, dtype=torch.uint8, device=self.memory.device)
        wrapper.reset_workspace_buffer(self._workspace, small)
        return _Planned(wrapper, self.memory, self._flashinfer.fast_decode_plan)

    def _pool(self, spec: LayerSpec, device: torch.device) -> torch.Tensor:
        shape = (self.num_pages, 2, self.page_size, spec.num_kv_heads, spec.key_dim)
        memory = torch.empty(shape, dtype=self._kv_dtype, device=device)
        memory[0].view(torch.uint8).zero_()
        return memory


def _rows_dense(values: torch.Tensor) -> torch.Tensor:
    """Kernels take any stride between tokens and heads, but none within a head."""
    return values if values.stride(-1) == 1 else values.contiguous()
