"""Parts of kernels are compiled into them and go no further, and kernels have memory of their own without numba's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncengine.kernels.cpu import compiler_missing

if compiler_missing(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("no compiler", allow_module_level=True)

from numba.core.errors import TypingError

from asyncengine.kernels.cache_folder import VARIABLE
from asyncengine.kernels.cpu import cache
from asyncengine.kernels.cpu.cache import kernel_folder
from asyncengine.kernels.cpu.jit import allocates, array, pointer, room, serial

_WHOLE = np.int64(0)


@serial
def _twice(value: int) -> int:
    return value * 2


@serial
def _twice_and_one(value: int) -> int:
    return _twice(value) + 1


@serial
def _sum_of_squares(numbers: int, count: int) -> int:
    values, kept, total = array(pointer(numbers, _WHOLE), (count,)), room(8, _WHOLE), 0
    for index in range(8):
        kept[index] = values[index] * values[index]
    for index in range(len(kept)):
        total += kept[index]
    return total


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here may be found as an earlier run compiled it."""
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(cache, "kernel_folder", functools.cache(kernel_folder.__wrapped__))


def test_a_part_is_neither_kept_nor_made_machine_code(tmp_path: Path) -> None:
    assert _twice_and_one(20) == 41
    (file,) = tmp_path.glob("kernels/*/*")
    assert file.name.startswith("test_compiling._twice_and_one-")
    inner: Any = _twice
    assert not inner.signatures, "compiled for Python, which does not call it"
    (part,) = inner.part.overloads.values()
    assert not part.library.emitted
    assert _twice(4) == 8  # until it is called


def test_memory_on_the_stack() -> None:
    numbers = np.arange(8)
    assert _sum_of_squares(numbers.ctypes.data, 8) == int((numbers**2).sum())


def test_who_allocates_must_say_so() -> None:
    def first_of_its_own(value: int) -> int:
        made = np.empty(4, np.int64)
        made[0] = value
        return int(made[0])

    with pytest.raises(TypingError):
        serial(first_of_its_own)(3)
    assert serial(allocates(first_of_its_own))(3) == 3
