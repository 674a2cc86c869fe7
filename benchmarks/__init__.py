"""Measurements that are kept beside the code. Most files are scripts; `peers` and `cluster` are packages."""
