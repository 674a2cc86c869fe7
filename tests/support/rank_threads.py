"""The ranks of one model as threads of one process, over the shared memory that processes have."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from asyncengine.device.shared_gather import SharedGather, make_memory

Made = TypeVar("Made")


def gathers(size: int) -> list[SharedGather]:
    """Every rank's view of one memory."""
    memory = make_memory()
    try:
        return [SharedGather(memory, rank, size) for rank in range(size)]
    finally:
        os.close(memory)


def in_ranks(size: int, work: Callable[[Any], Made], ranks: list[SharedGather] | None = None) -> list[Made]:
    """`work(ranks)` of every rank, of those given or of new ones. One that fails leaves nobody waiting."""
    ranks = ranks or gathers(size)

    def run(one: SharedGather) -> Made:
        try:
            with torch.inference_mode():
                return work(one)
        except BaseException as error:
            one.break_off(repr(error))
            raise

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(run, ranks))
