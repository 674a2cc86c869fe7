"""Measurements that are kept beside the code. Most files here are scripts; `benchmarks.peers` is a package."""
