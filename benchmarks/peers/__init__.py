"""This engine and every peer that is installed, on the same checkpoint, token ids, precision and threads, in one run.

`python -m benchmarks.peers --help`; what it does and how to read it: `benchmarks/README.md`.
"""
