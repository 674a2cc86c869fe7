"""Independent pieces of Python work, each on one thread, side by side: as many as an engine's kernels may use.

For what unpacks and packs weights: numpy, torch and compiled kernels, which all let go of the interpreter's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from asyncengine.execution.device.openmp import torch_threads
from asyncengine.kernels.api import team

Item = TypeVar("Item")


def share_out(work: Callable[[Item], object], items: Sequence[Item]) -> None:
    """Call `work` for each item, on this thread and on those that its team stands for (`device.cores.Cores.loading`);
    in any order. Raises what the first call raises that does; those that were not begun by then are left out.

    Kernels and torch's operators within use one thread each, so that the teams of several do not meet.
    """
    helpers = min(team.team_threads()[0], len(items)) - 1
    if helpers < 1:
        for item in items:
            work(item)
        return
    left, errors = iter(items), list[BaseException]()
    inference = torch.is_inference_mode_enabled()

    def take() -> None:
        try:
            with torch.inference_mode(inference), torch_threads(1), team.alone():
                for item in left:  # of a sequence: each is taken once, whoever asks
                    if errors:
                        return
                    work(item)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=take, name="asyncengine-load", daemon=True) for _ in range(helpers)]
    started = [thread for thread in threads if _start(thread)]
    take()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]


def _start(thread: threading.Thread) -> bool:
    """False: the system has no more threads, and those that there are do it all."""
    try:
        thread.start()
    except RuntimeError:
        return False
    return True
