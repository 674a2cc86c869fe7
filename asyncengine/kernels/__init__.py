"""What a device computes fast: compiled kernels, by device. `kernels.cpu` for CPUs."""
