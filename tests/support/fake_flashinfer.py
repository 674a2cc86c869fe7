"""A stand-in for the `flashinfer` module and for device memory, on a machine without a GPU.

Every call is checked as the real kernels would (and where they would not check but compute garbage: more strictly),
then computed with torch in float32 from what lies in memory *when the kernel runs*. Launches can be captured and
replayed like a CUDA graph: a replay sees the same tensors, with whatever they hold by then.

No kernel takes a tensor without rows: the real ones launch as many blocks as there are rows, and CUDA refuses none.

The device is always behind: what was queued counts as finished only once an event recorded after it was waited for.
Until then a staging area must not be filled again and an uploaded host array must not change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from support.flashinfer_checks import check_append, check_gated, check_out, check_queries, check_workspace, refuse_empty

MIB = 2**20
HEAD_DIMS = (64, 128, 256, 512)


class FakeEvent:
    """An event that knows how much was queued when it was recorded."""

    def __init__(self, memory: FakeMemory) -> None:
        self.memory = memory
        self.mark: int | None = None

    def record(self) -> None:
        assert not self.memory.capturing, "an event of a plan has no place in a graph"
        self.mark = self.memory.queued

    def synchronize(self) -> None:
        assert self.mark is not None, "waiting for an event that was never recorded"
        self.memory.waits += 1
        self.memory.finish(self.mark)


class FakeMemory:
    """`CudaMemory` on CPU: remembers which arrays would be pinned, which on the device, and which copies pend."""

    def __init__(self, hopper: bool = False) -> None:
        self.device = torch.device("cpu")
        self._hopper = hopper
        self.queued = 0
        self.finished = 0
        self.waits = 0
        self.capturing = False
        self._pinned: dict[int, torch.Tensor] = {}
        self._device: dict[int, torch.Tensor] = {}
        self._pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def host(self, count: int) -> torch.Tensor:
        made = torch.full((count,), -(2**31), dtype=torch.int32)
        self._pinned[_address(made)] = made
        return made

    def reserve(self, count: int) -> torch.Tensor:
        made = torch.zeros(count, dtype=torch.int32)
        self._device[_address(made)] = made
        return made

    def upload(self, source: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        assert self.is_pinned(source), "copying from pageable memory waits"
        assert not self.capturing, "an upload has no place in a graph"
        self.queue()
        self._pending.append((self.queued, source, source.clone()))
        if into is None:
            made = source.clone()
            self._device[_address(made)] = made
            return made
        assert self.is_device(into)
        assert source.numel() <= into.numel(), "more than the fixed buffer holds"
        into[: source.numel()] = source
        return into[: source.numel()]

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def processors(self) -> int:
        return 4

    def hopper(self) -> bool:
        return self._hopper

    def queue(self) -> int:
        self.queued += 1
        return self.queued

    def finish(self, mark: int) -> None:
        """The device has done everything up to `mark`."""
        self.finished = max(self.finished, mark)
        for number, source, before in self._pending:
            if number <= self.finished:
                assert torch.equal(source, before), "a host array changed before its copy had run"
        self._pending = [entry for entry in self._pending if entry[0] > self.finished]

    def is_pinned(self, values: torch.Tensor) -> bool:
        return _address(values) in self._pinned

    def is_device(self, values: torch.Tensor) -> bool:
        return _address(values) in self._device


def _address(values: torch.Tensor) -> int:
    return values.untyped_storage().data_ptr()


class FakeGraph:
    """Launches in order, with the tensors they were made with."""

    def __init__(self) -> None:
        self.launches: list[Callable[[], None]] = []

    def replay(self) -> None:
        for launch in self.launches:
            launch()


class FakeFlashInfer:
    """The module object. `dtypes` may hold float32, which the real one lacks, for exact comparison."""

    def __init__(
        self, memory: FakeMemory, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
    ) -> None:
        self.memory = memory
        self.dtypes = dtypes
        self.calls: Counter[str] = Counter()
        self._graph: FakeGraph | None = None

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> PrefillWrapper:  # noqa: N802
        return PrefillWrapper(self, *args, **kwargs)

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> DecodeWrapper:  # noqa: N802
        return DecodeWrapper(self, *args, **kwargs)

    @contextmanager
    def capture(self) -> Iterator[FakeGraph]:
        self._graph = FakeGraph()
        self.memory.capturing = True
        try:
            yield self._graph
        finally:
            self._graph, self.memory.capturing = None, False

    def launch(self, name: str, kernel: Callable[[], None]) -> None:
        self.calls[name] += 1
        if self._graph is not None:
            self._graph.launches.append(kernel)
        kernel()

    def fast_decode_plan(
        self, wrapper: DecodeWrapper, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        *sizes: int, global_override_indptr_cpu: torch.Tensor, **options: Any,
    ) -> None:  # fmt: skip
        """Plan one that was planned before, with everything else as it was; its fixed buffers are left alone."""
        assert wrapper.planned, "the first plan finds the kernel"
        assert wrapper.size == len(last_page_len), "the number of rows is fixed in a graph"
        assert sizes == tuple(wrapper.planned[name] for name in ("heads", "kv_heads", "dim", "page_size"))
        assert options.items() <= wrapper.planned.items(), "a captured kernel cannot change its options"
        for array in (indptr, last_page_len, global_override_indptr_cpu):
            self.check_host_array(array, len(array))
        wrapper.plan_rows(global_override_indptr_cpu, indices)

    def append_paged_kv_cache(
        self, append_key: torch.Tensor, append_value: torch.Tensor, batch_indices: torch.Tensor,
        positions: torch.Tensor, paged_kv_cache: torch.Tensor, kv_indices: torch.Tensor, kv_indptr: torch.Tensor,
        kv_last_page_len: torch.Tensor, kv_layout: str = "NHD",
    ) -> None:  # fmt: skip
        assert kv_layout == "NHD"
        arrays = {
            "batch_indices": batch_indices, "positions": positions, "kv_indices": kv_indices, "kv_indptr": kv_indptr,
            "kv_last_page_len": kv_last_page_len,
        }  # fmt: skip
        check_append(append_key, append_value, paged_kv_cache, arrays, self.memory.is_pinned)
        page_size = paged_kv_cache.shape[2]
        for array in arrays.values():
            self.check_device_array(array)

        def kernel() -> None:
            rows, places = batch_indices.long(), positions.long()
            ends = (kv_indptr.diff() - 1) * page_size + kv_last_page_len
            assert bool((places >= 0).all() and (places < ends[rows]).all()), "written behind the row's end"
            pages = kv_indices[kv_indptr[rows].long() + places // page_size].long()
            targets = (pages * page_size + places % page_size)[pages > 0]
            assert len(targets.unique()) == len(targets), "two tokens written to one place"
            for which, new in enumerate((append_key, append_value)):
                paged_kv_cache[pages, which, places % page_size] = new

        self.launch("append", kernel)

    refuse_empty = staticmethod(refuse_empty)

    def silu_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        return self._gated("silu", input, torch.nn.functional.silu)

    def gelu_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        return self._gated("gelu", input, torch.nn.functional.gelu)

    def gelu_tanh_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        return self._gated("gelu_tanh", input, lambda x: torch.nn.functional.gelu(x, approximate="tanh"))

    def _gated(self, name: str, both: torch.Tensor, activation: Any) -> torch.Tensor:
        check_gated(f"{name}_and_mul", both, self.memory.is_pinned, self.dtypes)
        gate, up = both.float().chunk(2, dim=-1)
        self.calls[name] += 1
        return (activation(gate) * up).to(both.dtype)

    def check_device_array(self, array: torch.Tensor) -> None:
        assert self.memory.is_device(array), "an index array that is not on the device"
        assert array.dtype == torch.int32
        assert array.dim() == 1
        assert array.is_contiguous()

    def check_host_array(self, array: torch.Tensor, length: int) -> None:
        assert self.memory.is_pinned(array), "not pinned: a copy from it waits"
        assert array.dtype == torch.int32
        assert array.shape == (length,)
        assert array.is_contiguous()


def _check_cache(cache: torch.Tensor) -> tuple[int, int, int]:
    assert cache.dim() == 5
    assert cache.shape[1] == 2
    assert cache.stride(-1) == 1
    return cache.shape[2], cache.shape[3], cache.shape[4]


class Wrapper:
    """The base of both wrappers: workspaces, the staging area, the checks of a plan, the arithmetic. Their arguments
    are held against the package itself in tests/execution/attention/test_flashinfer_signatures.py."""

    name: str
    """Name of its launches, as counted."""

    def __init__(self, fake: FakeFlashInfer, float_workspace_buffer: torch.Tensor, kv_layout: str, backend: str):
        assert kv_layout == "NHD"
        assert backend == "fa2" or fake.memory.hopper(), "its kernels are for compute capability 9"
        self.backend = backend
        check_workspace("float_workspace_buffer", float_workspace_buffer, fake.memory.is_pinned)
        assert not bool(float_workspace_buffer[:4096].any()), "must be zero at first use"
        self.fake = fake
        self.int_workspace_bytes = 8 * MIB
        self.staged: int | None = None
        self.planned: dict[str, Any] = {}
        self.size: int | None = None
        """Rows of the graph that it is made for."""
        self.queries = 0
        self.arrays: tuple[torch.Tensor, ...] = ()
        """Pointers of queries and of pages, pages, and numbers of tokens in last ones, on the device."""

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        assert self.size or not self.fake.memory.capturing, "a wrapper without fixed buffers in a graph"
        assert q.shape[0] == self.queries
        made, logs = self.launch(self.name, q, paged_kv_cache, self.arrays)
        if out is not None:
            check_out(out, made, self.planned, self.fake.memory.is_pinned)
            made = out.copy_(made)
        return (made, logs) if return_lse else made

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        check_workspace("float_workspace_buffer", float_workspace_buffer, self.fake.memory.is_pinned)
        check_workspace("int_workspace_buffer", int_workspace_buffer, self.fake.memory.is_pinned)
        self.int_workspace_bytes = int_workspace_buffer.numel()

    def stage(self, tiles: int) -> None:
        """Fill the pinned staging area and queue its copy."""
        memory = self.fake.memory
        assert not memory.capturing, "a plan has no place in a graph"
        assert self.staged is None or self.staged <= memory.finished, "staging area overwritten before its copy ran"
        assert self.int_workspace_bytes >= 16 * tiles, "integer workspace too small"
        self.staged = memory.queue()

    def check_pages(
        self, indptr: torch.Tensor, indices: torch.Tensor, last: torch.Tensor, lens: torch.Tensor, page_size: int
    ) -> None:
        rows = len(last)
        self.fake.refuse_empty("plan", last)
        for array, length in ((indptr, rows + 1), (last, rows), (lens, rows)):
            self.fake.check_host_array(array, length)
        self.fake.check_device_array(indices)
        assert int(indptr[0]) == 0
        assert bool((indptr.diff() >= 1).all()), "each row has at least one page"
        assert len(indices) == int(indptr[-1])
        assert bool(((last >= 1) & (last <= page_size)).all())
        assert torch.equal(lens, (indptr.diff() - 1) * page_size + last)
        self.check_listed(indptr, indices)

    @staticmethod
    def check_listed(indptr: torch.Tensor, indices: torch.Tensor) -> None:
        for row in range(len(indptr) - 1):
            pages = indices[int(indptr[row]) : int(indptr[row + 1])].tolist()
            assert pages == [0] * len(pages) or 0 not in pages, "the padding page among a row's own"
            assert len(set(pages)) == len(pages) or pages[0] == 0

    def check_model(self, sizes: Sequence[int], options: dict[str, Any]) -> None:
        """`sizes`: query heads, heads of keys and values, their dimensions, and tokens of a page."""
        heads, kv_heads, dim, page_size = sizes
        assert heads % kv_heads == 0
        assert dim in (HEAD_DIMS if self.backend == "fa2" else HEAD_DIMS[:3])
        assert self.backend == "fa2" or options["kv_data_type"] == options["q_data_type"], "8 bits beside 16"
        assert options["pos_encoding_mode"] == "NONE", "the model rotates by itself"
        assert options["q_data_type"] == options["o_data_type"]
        assert options["q_data_type"] in self.fake.dtypes
        assert options["kv_data_type"] in (options["q_data_type"], torch.float8_e4m3fn)
        assert options["non_blocking"] is True
        assert options["window_left"] >= -1
        assert options["logits_soft_cap"] is None or options["logits_soft_cap"] > 0
        self.planned = {**options, "heads": heads, "kv_heads": kv_heads, "dim": dim, "page_size": page_size}

    def launch(
        self, name: str, q: torch.Tensor, cache: torch.Tensor, arrays: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(results, logarithms to base 2 of the softmaxes' denominators)"""
        plan = dict(self.planned)
        assert plan, "plan comes before run"
        check_queries(q, cache, plan, self.fake.memory.is_pinned)
        page_size, kv_heads, dim = _check_cache(cache)
        assert (page_size, kv_heads, dim) == (plan["page_size"], plan["kv_heads"], plan["dim"])
        assert q.shape[1:] == (plan["heads"], dim)
        out = torch.full(q.shape, math.nan, dtype=plan["o_data_type"])
        logs = torch.full(q.shape[:2], math.nan)

        def kernel() -> None:
            self.at_launch()
            _attention(plan, q, cache, arrays, out, logs)

        self.fake.launch(name, kernel)
        return out, logs

    def at_launch(self) -> None:
        """Check what must hold when a kernel runs, also when it is replayed."""


def _attention(
    plan: dict[str, Any], q: torch.Tensor, cache: torch.Tensor, arrays: tuple[torch.Tensor, ...], out: torch.Tensor,
    logs: torch.Tensor,
) -> None:  # fmt: skip
    qo_indptr, kv_indptr, kv_indices, last_page_len = arrays
    scale = plan["sm_scale"] if plan["sm_scale"] is not None else plan["dim"] ** -0.5
    group = plan["heads"] // plan["kv_heads"]
    for row in range(len(last_page_len)):
        first, end = int(qo_indptr[row]), int(qo_indptr[row + 1])
        pages = kv_indices[int(kv_indptr[row]) : int(kv_indptr[row + 1])].long()
        length = (len(pages) - 1) * plan["page_size"] + int(last_page_len[row])
        key, value = (cache[pages, which].flatten(0, 1)[:length].float() for which in (0, 1))
        key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q[first:end].float(), key) * scale
        if plan["logits_soft_cap"]:
            scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
        at = torch.arange(length - (end - first), length)[:, None]
        keys = torch.arange(length)[None]
        hidden = keys > at if plan["causal"] else torch.zeros(end - first, length, dtype=torch.bool)
        if plan["window_left"] >= 0:
            hidden = hidden | (keys < at - plan["window_left"])
        scores = scores.masked_fill(hidden, -math.inf)
        weights = torch.softmax(scores, dim=-1)
        logs[first:end] = scores.logsumexp(-1).T * math.log2(math.e)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, value).to(out.dtype)


class PrefillWrapper(Wrapper):
    """`BatchPrefillWithPagedKVCacheWrapper`, without CUDA graphs."""

    def __init__(
        self, fake: FakeFlashInfer, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str
    ) -> None:
        assert backend in ("fa2", "fa3"), "auto would take fa3 for short prompts too, where it is slower"
        super().__init__(fake, float_workspace_buffer, kv_layout, backend)
        self.name = "prefill" if backend == "fa2" else "long"

    def plan(
        self, qo_indptr: torch.Tensor, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor,
        *sizes: int, seq_lens: torch.Tensor, max_token_per_sequence: int, **options: Any,
    ) -> None:  # fmt: skip
        rows = len(last_page_len)
        self.fake.check_host_array(qo_indptr, rows + 1)
        assert int(qo_indptr[0]) == 0
        assert bool((qo_indptr.diff() >= 1).all())
        assert int(qo_indptr.diff().max()) == max_token_per_sequence
        assert bool((qo_indptr.diff() <= seq_lens).all())
        self.check_pages(indptr, indices, last_page_len, seq_lens, sizes[3])
        self.check_model(sizes, {"causal": False, **options})
        self.stage(rows)
        self.queries = int(qo_indptr[-1])
        upload = self.fake.memory.upload
        self.arrays = (upload(qo_indptr), upload(indptr), indices, upload(last_page_len))


class DecodeWrapper(Wrapper):
    """`BatchDecodeWithPagedKVCacheWrapper`, one query per row; with CUDA graphs it reads its fixed buffers only."""

    name = "decode"

    def __init__(
        self, fake: FakeFlashInfer, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", *, backend: str,
        use_tensor_cores: bool = False, use_cuda_graph: bool = False, **buffers: torch.Tensor,
    ) -> None:  # fmt: skip
        super().__init__(fake, float_workspace_buffer, kv_layout, backend)
        self.use_tensor_cores = use_tensor_cores
        self.divided: torch.Tensor | None = None
        """Row pointers that the plan of a graph was made for."""
        if use_cuda_graph:
            fixed = [buffers[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
            self.size = self.queries = len(fixed[2])
            assert len(fixed[0]) == self.size + 1
            for buffer in fixed:
                fake.check_device_array(buffer)
            self.arrays = (torch.arange(self.size + 1), *fixed)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, *sizes: int,
        seq_lens: torch.Tensor | None = None, **options: Any,
    ) -> None:  # fmt: skip
        rows = len(last_page_len)
        if self.size is None:
            assert seq_lens is not None, "else they are found by a loop over the rows, in each step"
            self.check_pages(indptr, indices, last_page_len, seq_lens, sizes[3])
        group = sizes[0] // sizes[1]
        assert self.use_tensor_cores == (group >= 4 or sizes[2] > 256), "no CUDA-core kernel for this, or a slow one"
        frozen = {key: self.planned.get(key) for key in options}
        self.check_model(sizes, {"causal": False, **options})
        upload = self.fake.memory.upload
        if self.size is None:
            self.queries = rows
            self.stage(rows * (group // 16 + 2))
            self.arrays = (torch.arange(rows + 1), upload(indptr), indices, upload(last_page_len))
            return
        assert rows == self.size, "the number of rows is fixed in a graph"
        assert not any(frozen.values()) or frozen == options, "a captured kernel cannot change its options"
        self.plan_rows(indptr, indices)
        _, indptr_buffer, indices_buffer, last_buffer = self.arrays
        upload(indptr, into=indptr_buffer)
        indices_buffer[: len(indices)] = indices
        upload(last_page_len, into=last_buffer)

    def plan_rows(self, indptr: torch.Tensor, indices: torch.Tensor) -> None:
        """Divide the pages of a graph's rows."""
        assert len(indices) == int(indptr[-1]) <= len(self.arrays[2])
        self.stage(len(indptr) * (self.planned["heads"] // self.planned["kv_heads"] // 16 + 2))
        self.divided = indptr.clone()

    def at_launch(self) -> None:
        if self.size is not None:
            assert self.divided is not None
            assert torch.equal(self.divided, self.arrays[1]), "planned for rows with other numbers of pages"
            self.check_listed(self.arrays[1], self.arrays[2])
            last = self.arrays[3]
            assert bool(((last >= 1) & (last <= self.planned["page_size"])).all())
