"""Kernels for CPUs are compiled by numba: where that is missing, none of these files is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("numba") else ["test_*.py"]
