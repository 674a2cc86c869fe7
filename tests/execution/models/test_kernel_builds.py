"""FlashInfer's modules are built beside the reading of weights: those a model calls, several at once."""

from __future__ import annotations

import importlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import Gemma2Config, Qwen3Config

from asyncengine.config import EngineConfig
from asyncengine.execution.attention.base import LayerSpec
from asyncengine.execution.layers.kernels import LayerKernels
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.models import kernel_builds
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.families import decoder_config_of
from asyncengine.execution.models.kernel_builds import attention_modules, building, modules_of
from asyncengine.execution.models.progress import LoadProgress

HALF = torch.bfloat16


class Modules:
    """The functions by which FlashInfer's wrappers get their modules; that these take such arguments is asked of the
    package itself below."""

    def __init__(self) -> None:
        self.built: list[tuple[Any, ...]] = []
        self.prefill = SimpleNamespace(get_batch_prefill_module=self._prefill)
        self.decode = SimpleNamespace(get_batch_decode_module=lambda *kind: self._attention("decode", *kind))
        self.activation = SimpleNamespace(get_act_and_mul_module=lambda name: self.built.append((name,)))
        self.page = SimpleNamespace(get_page_module=lambda: self.built.append(("page",)))

    def _prefill(self, backend: str, *kind: Any) -> None:
        assert kind[-1] is False, "products of queries and keys in float32"
        self._attention({"fa2": "prefill", "fa3": "long"}[backend], *kind[:-1])

    def _attention(
        self, name: str, q: Any, kv: Any, o: Any, idx: Any, qk: int, vo: int, pos: int, window: bool, cap: bool
    ) -> None:
        assert (q, idx, qk, pos) == (o, torch.int32, vo, 0)
        self.built.append((name, q, kv, qk, window, cap))


def built(monkeypatch: pytest.MonkeyPatch, config: Any, dtype: torch.dtype = HALF, **fields: Any) -> list[Any]:
    """Modules that are built for a model of this configuration."""
    modules = Modules()
    monkeypatch.setattr(kernel_builds, "load_flashinfer", lambda: modules)
    described = decoder_config_of(config, 64)
    assert described is not None
    options = LayerOptions(dtype, torch.device("cpu"), LayerKernels())
    for work in modules_of(Decoder(described, options, 64), EngineConfig(device="cpu", **fields), dtype):
        work()
    return modules.built


def sized(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": 64, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, **changes,
    }  # fmt: skip


def test_those_that_the_model_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of each kind of layer, whatever the number of layers; decodes of 5 heads per kv head use the prefill's."""
    assert built(monkeypatch, Qwen3Config(**sized())) == [
        ("prefill", HALF, HALF, 64, False, False), ("decode", HALF, HALF, 64, False, False), ("page",), ("silu",),
    ]  # fmt: skip
    eight = torch.float8_e4m3fn
    gemma = Gemma2Config(
        **sized(num_attention_heads=10, hidden_size=160, sliding_window=8), attn_logit_softcapping=20.0
    )
    assert built(monkeypatch, gemma, kv_cache_dtype="fp8") == [
        ("prefill", HALF, eight, 64, True, True), ("prefill", HALF, eight, 64, False, True), ("page",), ("gelu_tanh",),
    ]  # fmt: skip


def test_on_hopper_those_of_long_prompts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are built only where the backend calls them: of 128 dimensions, 16 bits, without windows and caps."""
    monkeypatch.setattr(kernel_builds, "is_hopper", lambda device: True)
    wide = Qwen3Config(**sized(head_dim=128))
    assert built(monkeypatch, wide) == [
        ("long", HALF, HALF, 128, False, False), ("prefill", HALF, HALF, 128, False, False),
        ("decode", HALF, HALF, 128, False, False), ("page",), ("silu",),
    ]  # fmt: skip
    capped = Gemma2Config(**sized(head_dim=128, sliding_window=8), attn_logit_softcapping=20.0)
    for config, fields in ((wide, {"kv_cache_dtype": "fp8"}), (Qwen3Config(**sized()), {}), (capped, {})):
        assert "long" not in [kind for kind, *_ in built(monkeypatch, config, **fields)]


def test_attention_that_runs_elsewhere_is_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    assert built(monkeypatch, Qwen3Config(**sized(head_dim=80))) == [("silu",)]
    assert built(monkeypatch, Qwen3Config(**sized()), torch.float32) == [("silu",)]


def test_several_at_once_beside_what_is_done_meanwhile() -> None:
    """Each waits for the other, and both for the block."""
    both, inside = threading.Barrier(2, timeout=30), threading.Event()
    done: list[str] = []

    def work(name: str) -> None:
        both.wait()
        assert inside.wait(30)
        done.append(name)

    with building([lambda: work("a"), lambda: work("b")], LoadProgress(False)):
        assert not done
        inside.set()
    assert sorted(done) == ["a", "b"], "waited for at the end"


def test_one_that_fails_is_left_to_whoever_calls_it() -> None:
    def broken() -> None:
        raise RuntimeError("Ninja build failed.")

    done: list[int] = []
    with building([broken, lambda: done.append(1)], LoadProgress(False)):
        pass
    assert done == [1]


def test_a_load_that_ends_early_waits_for_none() -> None:
    begun, go = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        assert go.wait(30)

    def load() -> None:
        with building([slow] * 50, LoadProgress(False)):
            assert begun.wait(30)
            raise KeyError

    with pytest.raises(KeyError):
        load()
    go.set()


def test_the_bar_says_so() -> None:
    said: list[Any] = []
    bar: Any = SimpleNamespace(stage=lambda *words: said.append(words), advance=lambda: said.append(1))
    with building([lambda: None] * 2, bar):
        assert not said
    assert said == [("compiling attention kernels", 2), 1, 1]


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
