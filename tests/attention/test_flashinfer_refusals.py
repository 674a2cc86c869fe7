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
