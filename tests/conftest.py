"""What all tests share: one thread per operator (tiny models gain nothing from more), no network, no progress bars."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; subprocesses inherit it
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.path.exists("/dev/nvidiactl"):  # kernels for GPUs run by Triton's interpreter, on host tensors
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    """Keep the collector from going through what stays: ten thousand tests and the modules they import. A full
    collection, of which tests of leaks ask for hundreds, takes a second else."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let what is left be collected at the end: libraries complain of what is not."""
    gc.unfreeze()
