"""FlashInfer's kernels in fused models, from a fake module: chosen by comparison, used in every layer, equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.drive import Driver, prompts
from support.fake_flashinfer import FakeFlashInfer, FakeMemory
from support.tiny_models import VOCAB
from support.wide_models import make_wide

from asyncengine.config import EngineConfig
from asyncengine.models import loading
from asyncengine.models.families import run_recorded
from asyncengine.models.kernels import DeviceKernels, device_kernels
from asyncengine.runner.building import build_runner

CPU = torch.device("cpu")
LAYERS = 3


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    """Models loaded in this test are offered the kernels of this module."""
    made = FakeFlashInfer(FakeMemory())
    monkeypatch.setattr(loading, "device_kernels", lambda *args: DeviceKernels(made))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    @cache
    def get(name: str) -> str:
        folder: Path = make_wide(name, tmp_path_factory.mktemp("wide") / name)
        return str(folder)

    return get


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(page_size=4, max_num_seqs=64, kv_cache_memory="24MiB", device="cpu", **fields)


EXPECTED = {
    "llama": ({"rms_norm": 7, "gate_up": 3, "rope": 3}, "silu"),
    "qwen3": ({"rms_norm": 13, "gate_up": 3, "rope": 3}, "silu"),
    "gemma2": ({"rms_norm": 13, "gate_up": 3, "rope": 3}, "gelu_tanh"),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_kernels_take_every_part_and_change_no_answer(
    name: str, folder: Callable[[str], str], fake: FakeFlashInfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loading.load_model(folder(name), config())
    counts, activation = EXPECTED[name]
    done = dict(entry.split(" x ") for entry in model.fused)
    for part, count in counts.items():
        assert done[part] == done[f"{part} kernel"] == str(count)
    fake.calls.clear()
    found = run_recorded(model.module, CPU)[0]
    assert fake.calls == {"rmsnorm": counts["rms_norm"], activation: LAYERS, "rope": LAYERS}
    runner = build_runner(model, config())
    driver = Driver(runner)
    asked = prompts([1, 19, 6], VOCAB)
    outputs = driver.run([driver.job(prompt, 10) for prompt in asked], chunk=7)
    runner.close()
    monkeypatch.setattr(loading, "device_kernels", lambda *args: None)
    plain = loading.load_model(folder(name), config(fuse=False))
    expected = run_recorded(plain.module, CPU)[0]
    assert torch.allclose(found, expected, atol=2e-5 * float(expected.abs().max()))
    runner = build_runner(plain, config())
    driver = Driver(runner)
    assert driver.run([driver.job(prompt, 10) for prompt in asked]) == outputs
    runner.close()


def wrong(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the kernel gives, and a little more."""
    made = kernel(*args, **kwargs)
    return tuple(part + 0.1 for part in made) if isinstance(made, tuple) else made + 0.1


def broken(*args: Any, **kwargs: Any) -> Any:
    raise FileNotFoundError("nvcc")


@pytest.mark.parametrize("trouble", [wrong, broken])
def test_kernels_that_differ_or_fail_are_left_out(
    trouble: Any,
    folder: Callable[[str], str],
    fake: FakeFlashInfer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = ("rmsnorm", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul", "apply_rope_with_cos_sin_cache")
    for name in names:
        monkeypatch.setattr(fake, name, partial(trouble, getattr(fake, name)))
    done = dict(entry.split(" x ") for entry in loading.load_model(folder("llama"), config()).fused)
    for part, count in {"gate_up": "3", "qkv": "3", "rms_norm": "7", "rope": "3"}.items():
        assert done[part] == count
        assert f"{part} kernel" not in done
    assert len(caplog.records) == (trouble is broken), "said once, and not tried again"


def test_rotation_keeps_to_its_own_table() -> None:
    """A table is converted once for all layers, and anew for the next step's, also where memory is used again."""
    rotation = DeviceKernels(FakeFlashInfer(FakeMemory())).rotation()
    query, key = torch.randn(1, 4, 3, 64), torch.randn(1, 2, 3, 64)
    seen = set()
    for angle in (0.0, math.pi / 2, math.pi):
        table = torch.full((1, 3, 64), angle)
        cos, sin = table.cos(), table.sin()
        for _ in range(2):
            found, _ = rotation(query, key, cos, sin)
            half = torch.cat((-query[..., 32:], query[..., :32]), dim=-1)
            assert torch.allclose(found, query * math.cos(angle) + half * math.sin(angle), atol=1e-5)
        seen.add(rotation._table.data_ptr())
        del cos, sin
    assert len(seen) > 1


def test_heads_without_a_kernel_are_rotated_by_torch(fake: FakeFlashInfer, tmp_path: Path) -> None:
    from support.tiny_models import make_checkpoint

    make_checkpoint("llama", tmp_path / "m")  # heads of 12 dimensions
    model = loading.load_model(str(tmp_path / "m"), config())
    fake.calls.clear()
    run_recorded(model.module, CPU)
    assert fake.calls["rope"] == 0


def test_offered_only_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from asyncengine.models import kernels

    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(kernels, "load_flashinfer", lambda: FakeFlashInfer(FakeMemory()))
    assert device_kernels(config(), torch.bfloat16, cuda) is not None
    assert device_kernels(config(), torch.bfloat16, CPU) is None
    assert device_kernels(config(), torch.float32, cuda) is None
    assert device_kernels(config(attention_backend="torch"), torch.bfloat16, cuda) is None
    monkeypatch.setattr(kernels, "load_flashinfer", broken)
    assert device_kernels(config(), torch.bfloat16, cuda) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert device_kernels(config(), torch.float16, cuda) is None
