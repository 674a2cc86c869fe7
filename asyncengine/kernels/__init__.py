"""Compiled kernels, by device. `kernels.cpu` for CPUs, `kernels.cuda` for NVIDIA GPUs."""
