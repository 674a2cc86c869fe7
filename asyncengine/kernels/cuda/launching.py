"""Launching compiled kernels without looking for them again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may begin here before the one ahead of it has ended (programmatic dependent launch).

    Such a kernel waits (`gdc_wait`) before it touches anything that kernels write; until then it may fetch weights.
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class Launcher:
    """A Triton kernel whose parameters are tensors, then numbers that nothing is specialised for, then constants.

    Such numbers are floats, and integers that the kernel names in `do_not_specialize`.

    Triton looks at every argument of a launch to find what it has compiled: 30 microseconds of the host where the
    launch itself takes 5. Here constants, types and alignment are the key, and a kernel once found is launched as
    Triton's tutorials launch those that were compiled ahead. The last constant says whether it starts early.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, grid: tuple[int, int, int], tensors: Sequence[torch.Tensor], numbers: tuple[float, ...],
        constants: tuple[Any, ...], **options: int,
    ) -> None:  # fmt: skip
        """`options`, as Triton's launches take them, are the same for the same constants."""
        address_bits = 0
        for tensor in tensors:
            address_bits |= tensor.data_ptr()
        # Triton compiles another kernel where addresses are no multiples of 16; that is rare, and not kept here
        key = (tensors[0].get_device(), address_bits % 16 == 0, *[tensor.dtype for tensor in tensors], *constants)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*tensors, *numbers, *constants)
            return
        early = {"launch_pdl": True} if constants[-1] else {}
        compiled = self._kernel[grid](*tensors, *numbers, *constants, **options, **early)
        if compiled is not None and address_bits % 16 == 0:  # the interpreter compiles nothing
            self._compiled[key] = compiled
