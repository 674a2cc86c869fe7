"""Kernels for GPUs, by Triton's interpreter: where there is no Triton nothing is run, and on a GPU `tests/gpu` has them
compiled, as one process does only one of both."""

import importlib.util

import torch

collect_ignore_glob = ["test_*"] if torch.cuda.is_available() or importlib.util.find_spec("triton") is None else []
