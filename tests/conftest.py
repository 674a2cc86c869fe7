"""Settings of all tests: one thread per operator (tiny models gain nothing from more), no network, no progress bars."""

import atexit
import gc
import os
import sys
from collections.abc import Iterator

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; subprocesses inherit it
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Else each worker rewrites the asserts of all tests anew, and each process that a test starts compiles the package.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if "ASYNCENGINE_GPU" not in os.environ:  # else what is tested would depend on the machine: tests/gpu needs it
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels for GPUs, by Triton's interpreter, on host tensors


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the collector of garbage from going through what stays: ten thousand tests and the modules they import. A
    full collection, of which tests of leaks ask for hundreds, takes a second else."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        _freeze()


def pytest_collection_finish() -> None:
    """Kernels that Triton's interpreter runs take half the time."""
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") == "1":
        from support.triton_interpreter import patch_once_a_launch

        patch_once_a_launch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Freeze again after each file: some unfreeze all, and what a file imported stays, too."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


# Let what is left be collected as the process ends: libraries complain else. Not before, where pytest collects twice.
atexit.register(gc.unfreeze)
