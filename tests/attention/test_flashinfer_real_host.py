"""The installed FlashInfer's own Python on CPU, with torch in place of its compiled modules.

What its plans and runs do with our arrays before any kernel is theirs: conversions, checks, copies into graph buffers,
default scales. So the numbers that come out here have gone through the real package, all but the kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.attention_pair import Pair, make_flashinfer, prepare
from support.fake_flashinfer import FakeFlashInfer, FakeMemory, _attention

from asyncengine.attention.base import LayerSpec

BASE = LayerSpec(index=0, num_heads=4, num_kv_heads=2, key_dim=64, value_dim=64, scale=0.3)
LAYERS = {
    "plain": [BASE],
    "tensor cores": [replace(BASE, num_kv_heads=1)],
    "groups": [replace(BASE, window=6, softcap=2.0), replace(BASE, index=1, softcap=2.0)],
}


class Compiled:
    """What `get_batch_*_module` returns: the C++ half. Plans get row arrays on the host, runs everything else."""

    def __init__(self, *kernel: Any) -> None:
        of_prefill = kernel[0] == "fa2"  # decode modules name no backend, and end with these two
        self.window_known, self.softcap_known = kernel[-3:-1] if of_prefill else kernel[-2:]
        self.paged_run = self.run = self._run

    def plan(self, *args: Any) -> dict[str, Any]:
        assert all(part.device.type == "cpu" for part in args if isinstance(part, torch.Tensor))
        return {"planned": args}

    def _run(self, workspace: Any, integers: Any, plan_info: Any, q: Any, key: Any, value: Any, *rest: Any) -> None:
        wrapper = WRAPPERS[plan_info["planned"][2].data_ptr()]
        *indices, out, lse = rest[: [type(part) for part in rest].index(type(None)) + 1]
        assert lse is None
        causal = len(indices) == 4 and getattr(wrapper, "_causal", False)
        if len(indices) == 3:
            indices = [torch.arange(q.shape[0] + 1), *indices]
        plan = {
            "sm_scale": wrapper._sm_scale, "dim": q.shape[2], "heads": q.shape[1], "kv_heads": key.shape[2],
            "page_size": key.shape[1], "causal": causal, "window_left": wrapper._window_left,
            "logits_soft_cap": wrapper._logits_soft_cap,
        }  # fmt: skip
        assert self.window_known == (wrapper._window_left != -1)
        assert self.softcap_known == (wrapper._logits_soft_cap > 0)
        _attention(plan, q, torch.stack((key, value), dim=1), tuple(indices), out)


WRAPPERS: dict[int, Any] = {}


@pytest.fixture
def real(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The package with its compiled modules exchanged."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path_factory.mktemp("flashinfer")))
    flashinfer = pytest.importorskip("flashinfer")
    if torch.cuda.is_available():
        pytest.skip("the real kernels are tried in tests/gpu")
    empty = torch.empty

    def unpinned(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return empty(*args, **more)

    monkeypatch.setattr(torch, "empty", unpinned)
    for module in (flashinfer.decode, flashinfer.prefill):
        for name in ("get_batch_decode_module", "get_batch_prefill_module"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, Compiled)
    fake = FakeFlashInfer(FakeMemory())

    def append(*args: Any) -> None:
        key, value, rows, positions, keys, values, indices, indptr, last, layout = args
        assert layout == 0
        pool = torch.stack((keys, values), dim=1)
        for array in (rows, positions, indices, indptr, last):
            fake.memory._device[array.untyped_storage().data_ptr()] = array
        fake.append_paged_kv_cache(key, value, rows, positions, pool, indices, indptr, last)
        keys.copy_(pool[:, 0])
        values.copy_(pool[:, 1])

    monkeypatch.setattr(flashinfer.page, "get_page_module", lambda: SimpleNamespace(append_paged_kv_cache=append))
    yield _recorded(flashinfer)
    WRAPPERS.clear()


def _recorded(flashinfer: Any) -> Any:
    """The package, with each wrapper known by its pinned staging area."""

    def make(name: str) -> Any:
        def build(*args: Any, **kwargs: Any) -> Any:
            wrapper = getattr(flashinfer, name)(*args, **kwargs)
            plan = wrapper.plan

            def planned(*args: Any, **kwargs: Any) -> None:
                WRAPPERS[wrapper._pin_memory_int_workspace_buffer.data_ptr()] = wrapper
                plan(*args, **kwargs)

            wrapper.plan = planned
            return wrapper

        return build

    names = ("BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper")
    return SimpleNamespace(
        append_paged_kv_cache=flashinfer.append_paged_kv_cache,
        memory=FakeMemory(),
        **{name: make(name) for name in names},
    )


@pytest.mark.parametrize("variant", LAYERS)
def test_numbers_through_the_real_package(variant: str, real: Any) -> None:
    layers = LAYERS[variant]
    backend = make_flashinfer(layers, real, dtype=torch.float16)
    pair = Pair(backend, layers, rows=3, dtype=torch.float16)
    pair.fixed = prepare(backend, 4)
    assert pair.step([(0, 3), (1, 30), (2, 17)]) < 0.01
    for _ in range(4):
        assert pair.step([(1, 1), (0, 1)]) < 0.01
        assert pair.step([(2, 9), (1, 1), (0, 7)]) < 0.01
        assert pair.step([(2, 1), (0, 1), (1, 1)], padded=4) < 0.01
