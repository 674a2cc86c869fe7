"""Machines that kernels are compiled for: another CPU than this one, and one without a matrix unit.

Numbers: `test_rounding` (weights rounded to 8 and 4 bits), `test_quantized_forms` (products in every form)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

import llvmlite.binding

from asyncengine.kernels.cpu import vectors


def test_other_machines_features_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels compiled for a chosen CPU use what that one has, not what this one has."""
    import numba

    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", None)  # set where tests run for another CPU
    assert not vectors.cpu_has("sse2")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+avx2,+fma")
    assert vectors.cpu_has("avx2", "fma")
    assert not vectors.cpu_has("avx2", "avx512vnni")


WITHOUT_UNIT = """
import torch
from asyncengine.kernels.cpu import gemm_quantized, panel_form, vectors

assert not vectors.UNIT
assert gemm_quantized.code_for(panel_form.int_form(8), torch.float32)
"""


def test_a_cpu_without_a_matrix_unit_needs_none_of_its_instructions(tmp_path: Path) -> None:
    """Its compiler does not know them, and ends the process where it meets one."""
    features = {name: has and "amx" not in name for name, has in llvmlite.binding.get_host_cpu_features().items()}
    named = ",".join(f"{'+' if has else '-'}{name}" for name, has in features.items())
    chosen = {"NUMBA_CPU_NAME": llvmlite.binding.get_host_cpu_name(), "NUMBA_CPU_FEATURES": named}
    environment = {**os.environ, **chosen, "ASYNCENGINE_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", WITHOUT_UNIT], env=environment, check=True, timeout=300)
