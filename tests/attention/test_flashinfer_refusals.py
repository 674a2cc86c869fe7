"""The stand-in for FlashInfer refuses what FlashInfer refuses, and what its kernels would read garbage from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.fake_flashinfer import MIB, FakeFlashInfer, FakeMemory
from support.flashinfer_checks import aligned, check_workspace

HALF = torch.bfloat16
Change = Callable[[dict[str, Any]], object]


def some(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def on_host(memory: FakeMemory, like: torch.Tensor) -> torch.Tensor:
    made = memory.host(like.numel() * like.element_size() // 4).view(like.dtype).view(like.shape)
    made.copy_(like)
    return made


@pytest.fixture
def memory() -> FakeMemory:
    return FakeMemory()


@pytest.fixture
def fake(memory: FakeMemory) -> FakeFlashInfer:
    return FakeFlashInfer(memory, (torch.bfloat16, torch.float16))


def moved(tensor: torch.Tensor, by: int = 1) -> torch.Tensor:
    """The same numbers, `by` elements further on in their memory."""
    room = torch.zeros(tensor.numel() + by, dtype=tensor.dtype)
    made = room[by:].view(tensor.shape)
    made.copy_(tensor)
    return made


def spread(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same numbers, with `by` elements between rows."""
    room = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + by), dtype=tensor.dtype)
    made = room[..., : tensor.shape[-1]]
    made.copy_(tensor)
    return made


NORMS: dict[str, tuple[Change, type[Exception]]] = {
    "no rows": (lambda a: a.update(x=some(0, 64)), RuntimeError),
    "one dimension": (lambda a: a.update(x=some(64)), RuntimeError),
    "a weight of another width": (lambda a: a.update(weight=some(32)), RuntimeError),
    "a weight of two dimensions": (lambda a: a.update(weight=some(1, 64)), RuntimeError),
    "columns": (lambda a: a.update(x=some(64, 3).T), RuntimeError),
    "float32": (lambda a: a.update(x=a["x"].float(), weight=a["weight"].float()), RuntimeError),
    "a weight of another type": (lambda a: a.update(weight=a["weight"].float()), AssertionError),
    "an odd beginning": (lambda a: a.update(x=moved(a["x"])), AssertionError),
    "a weight's odd beginning": (lambda a: a.update(weight=moved(a["weight"])), AssertionError),
    "rows between vectors": (lambda a: a.update(x=spread(a["x"], 4)), AssertionError),
    "host memory": (lambda a: a.update(x=on_host(a["memory"], a["x"])), RuntimeError),
}


@pytest.mark.parametrize("wrong", NORMS)
@pytest.mark.parametrize("kernel", ["rmsnorm", "gemma_rmsnorm", "fused_add_rmsnorm", "gemma_fused_add_rmsnorm"])
def test_norms(kernel: str, wrong: str, fake: FakeFlashInfer, memory: FakeMemory) -> None:
    given: dict[str, Any] = {"x": some(3, 64), "weight": some(64), "memory": memory}
    change, error = NORMS[wrong]
    change(given)
    others = [torch.ones_like(given["x"])] if "fused" in kernel else []
    with pytest.raises(error):
        getattr(fake, kernel)(given["x"], *others, given["weight"])


def test_norms_that_are_taken(fake: FakeFlashInfer) -> None:
    """Rows that lie apart by whole vectors, heads of a merged projection, widths of no whole vector."""
    fake.rmsnorm(spread(some(3, 64), 8), some(64))
    fake.rmsnorm(spread(some(3, 2, 64), 8), some(64))
    fake.gemma_rmsnorm(some(3, 2, 64)[:, 1:], some(64))
    fake.rmsnorm(some(3, 12), some(12))


def test_sums_with_norms(fake: FakeFlashInfer) -> None:
    x, residual, weight = torch.randn(3, 64).to(HALF), torch.randn(3, 64).to(HALF), torch.randn(64).to(HALF)
    total = x.float() + residual.float()
    fake.fused_add_rmsnorm(x, residual, weight)
    assert torch.equal(residual, total.to(HALF))
    assert torch.equal(x, torch.nn.functional.rms_norm(total, (64,), weight.float(), 1e-6).to(HALF))
    with pytest.raises(RuntimeError, match="residual"):
        fake.fused_add_rmsnorm(some(3, 64), some(2, 64), weight)
    with pytest.raises(RuntimeError, match="2D"):
        fake.fused_add_rmsnorm(some(3, 2, 64), some(3, 2, 64), weight)
    with pytest.raises(AssertionError, match="both are written"):
        fake.fused_add_rmsnorm(x, x, weight)


@pytest.mark.parametrize(
    ("both", "error"),
    [
        (some(0, 64), RuntimeError),
        (some(2, 12), ValueError),
        (some(2, 8), RuntimeError),
        (some(2, 24), AssertionError),
        (some(2, 64, dtype=torch.float32), RuntimeError),
        (spread(some(2, 64), 64), AssertionError),
        (moved(some(2, 64)), AssertionError),
    ],
)
def test_activations(both: torch.Tensor, error: type[Exception], fake: FakeFlashInfer) -> None:
    for kernel in (fake.silu_and_mul, fake.gelu_and_mul, fake.gelu_tanh_and_mul):
        with pytest.raises(error):
            kernel(both)
    fake.silu_and_mul(some(2, 64))


ROTATIONS: dict[str, tuple[Change, type[Exception]]] = {
    "no tokens": (lambda a: a.update(query=some(0, 128), key=some(0, 64), positions=a["positions"][:0]), RuntimeError),
    "a table in 16 bits": (lambda a: a.update(table=a["table"].to(HALF)), ValueError),
    "a table with gaps": (lambda a: a.update(table=spread(a["table"], 8)), RuntimeError),
    "positions as floats": (lambda a: a.update(positions=a["positions"].float()), RuntimeError),
    "a position beyond the table": (lambda a: a.update(positions=a["positions"] + 62), AssertionError),
    "too few positions": (lambda a: a.update(positions=a["positions"][:2]), AssertionError),
    "too few keys": (lambda a: a.update(key=some(2, 64)), RuntimeError),
    "keys of another type": (lambda a: a.update(key=a["key"].half()), AssertionError),
    "a table wider than a head": (lambda a: a.update(table=torch.zeros(64, 128)), RuntimeError),
    "an odd beginning": (lambda a: a.update(query=moved(a["query"])), AssertionError),
    "positions in host memory": (
        lambda a: a.update(positions=on_host(a["memory"], a["positions"])), RuntimeError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", ROTATIONS)
def test_rotations(wrong: str, fake: FakeFlashInfer, memory: FakeMemory) -> None:
    given: dict[str, Any] = {
        "query": some(3, 128), "key": some(3, 64), "positions": torch.arange(3, dtype=torch.int32),
        "table": torch.zeros(64, 64), "memory": memory,
    }  # fmt: skip
    change, error = ROTATIONS[wrong]
    fake.apply_rope_with_cos_sin_cache(given["positions"], given["query"], given["key"], 64, given["table"])
    change(given)
    with pytest.raises(error):
        fake.apply_rope_with_cos_sin_cache(given["positions"], given["query"], given["key"], 64, given["table"])


APPENDS: dict[str, tuple[Change, type[Exception]]] = {
    "no tokens": (lambda a: a.update(append_key=some(0, 2, 64), append_value=some(0, 2, 64)), RuntimeError),
    "keys of another number of heads": (lambda a: a.update(append_key=some(3, 1, 64)), RuntimeError),
    "values of another width": (lambda a: a.update(append_value=some(3, 2, 32)), RuntimeError),
    "keys of two dimensions": (lambda a: a.update(append_key=some(3, 128)), RuntimeError),
    "keys of another type": (lambda a: a.update(append_key=a["append_key"].half()), AssertionError),
    "fewer values": (lambda a: a.update(append_value=some(2, 2, 64)), AssertionError),
    "keys between vectors": (lambda a: a.update(append_key=spread(a["append_key"], 4)), AssertionError),
    "too few positions": (lambda a: a.update(positions=a["positions"][:2]), RuntimeError),
    "a row pointer too many": (lambda a: a.update(kv_indptr=a["more"]), RuntimeError),
    "int64 pages": (lambda a: a.update(kv_indices=a["kv_indices"].long()), AssertionError),
    "pages with gaps": (lambda a: a.update(kv_indices=a["more"][::2]), RuntimeError),
    "lengths in host memory": (
        lambda a: a.update(kv_last_page_len=on_host(a["memory"], a["kv_last_page_len"])), RuntimeError,
    ),
    "keys in host memory": (lambda a: a.update(append_key=on_host(a["memory"], a["append_key"])), RuntimeError),
    "heads of 48": (
        lambda a: a.update(append_key=some(3, 2, 48), append_value=some(3, 2, 48), paged_kv_cache=some(4, 2, 4, 2, 48)),
        RuntimeError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", APPENDS)
def test_writing_keys_and_values(wrong: str, fake: FakeFlashInfer, memory: FakeMemory) -> None:
    def array(*values: int) -> torch.Tensor:
        made = memory.reserve(len(values))
        made.copy_(torch.tensor(values))
        return made

    given: dict[str, Any] = {
        "append_key": some(3, 2, 64), "append_value": some(3, 2, 64), "batch_indices": array(0, 0, 0),
        "positions": array(0, 1, 2), "paged_kv_cache": some(4, 2, 4, 2, 64), "kv_indices": array(1),
        "kv_indptr": array(0, 1), "kv_last_page_len": array(3),
    }  # fmt: skip
    fake.append_paged_kv_cache(**given)
    more = {"memory": memory, "more": array(0, 1, 2)}
    change, error = APPENDS[wrong]
    change(changed := {**given, **more})
    with pytest.raises(error):
        fake.append_paged_kv_cache(**{name: changed[name] for name in given})


def test_workspaces(fake: FakeFlashInfer, memory: FakeMemory) -> None:
    workspace = torch.zeros(MIB + 1, dtype=torch.uint8)
    wrapper = fake.BatchDecodeWithPagedKVCacheWrapper(workspace[:-1], use_tensor_cores=False, backend="fa2")
    with pytest.raises(ValueError, match="aligned"):
        wrapper.reset_workspace_buffer(workspace[1:], workspace[:-1])
    with pytest.raises(ValueError, match="int_workspace_buffer"):
        wrapper.reset_workspace_buffer(workspace[:-1], workspace[1:])
    with pytest.raises(AssertionError, match="counted as bytes"):
        check_workspace("x", torch.zeros(8), memory.is_pinned)
    with pytest.raises(AssertionError, match="on the device"):
        check_workspace("x", memory.host(8).view(torch.uint8), memory.is_pinned)


def test_a_lone_row_may_lie_anywhere_between_vectors() -> None:
    """Its stride is never used."""
    aligned(spread(some(1, 64), 3))
    with pytest.raises(AssertionError):
        aligned(spread(some(2, 64), 3))
