"""Launches that go through Triton's search for what it compiled, and those that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from asyncengine.kernels.cuda.launching import Launcher, starts_early


class Compiled:
    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments: self.log.append(("again", grid, arguments))


class Kernel:
    """A `triton.JITFunction`: launching compiles."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., Compiled]:
        def launch(*arguments: Any, **options: Any) -> Compiled:
            self.log.append(("searched", grid, arguments, options))
            return Compiled(self.log)

        return launch


def test_a_kernel_is_searched_for_once() -> None:
    kernel, x = Kernel(), torch.zeros(64)
    launch = Launcher(kernel)
    for rows in (1, 3):
        launch((rows, 1, 1), (x, x), (0.5,), (64, False), num_warps=2)
    assert kernel.log == [
        ("searched", (1, 1, 1), (x, x, 0.5, 64, False), {"num_warps": 2}),
        ("again", (3, 1, 1), (x, x, 0.5, 64, False)),
    ]


def test_what_it_is_compiled_for() -> None:
    """Other constants, another type of any tensor; and one out of line is not taken for one that lies in it."""
    kernel, x = Kernel(), torch.zeros(64)
    launch = Launcher(kernel)
    calls = [
        (x, (8, True)),
        (x, (4, True)),
        (x.half(), (8, True)),
        (x[1:], (8, True)),
        (x[1:], (8, True)),
        (x, (8, True)),
    ]
    for second, constants in calls:
        launch((1, 1, 1), (x, second), (), constants)
    assert [entry[0] for entry in kernel.log] == ["searched"] * 5 + ["again"]
    assert kernel.log[0][-1] == {"launch_pdl": True}


def test_nothing_starts_early_on_a_cpu() -> None:
    assert not starts_early(torch.device("cpu"))
