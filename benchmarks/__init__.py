"""Measurements that are kept beside the code. Most files here are scripts; `benchmarks.peers` and `benchmarks.cluster` are packages."""
