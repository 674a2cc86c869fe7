"""FlashInfer's modules are built beside the reading of weights: those a model calls, several at once."""

from __future__ import annotations

import importlib
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.models.loading import attention_modules

HALF = torch.bfloat16


def test_the_installed_package_builds_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its own functions take these arguments and name a module; none is compiled."""
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    flashinfer = pytest.importorskip("flashinfer")
    core = importlib.import_module("flashinfer.jit.core")
    names: list[str] = []
    for kind in {core.JitSpec, getattr(core, "JitSpecNvcc", core.JitSpec)}:
        monkeypatch.setattr(kind, "build_and_load", lambda self: names.append(self.name) or MagicMock())
    layers = [LayerSpec(0, 8, 4, 128, 128, 0.1), LayerSpec(1, 20, 4, 64, 64, 0.1, window=8, softcap=20.0)]
    for work in attention_modules(flashinfer, layers, HALF, torch.float8_e4m3fn, hopper=True):
        work()
    flashinfer.activation.get_act_and_mul_module("silu")
    assert [name.partition("_with")[0] for name in names] == [
        "batch_prefill", "batch_decode", "batch_prefill", "page", "silu_and_mul",
    ]  # fmt: skip
    assert "dtype_q_bf16_dtype_kv_e4m3_dtype_o_bf16_dtype_idx_i32_head_dim_qk_64" in names[2]
    assert "use_swa_True_use_logits_cap_True" in names[2]
