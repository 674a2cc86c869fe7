"""Whole models with the kernels of a GPU, Triton's in its interpreter, against torch's operations; and how many are
launched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.attention_pair import make_flashinfer
from support.bfloat16_dots import with_bfloat16_dots
from support.device_modes import Launches
from support.fake_flashinfer import FakeFlashInfer, FakeMemory, Wrapper
from support.forwards import Forwards
from support.lora_reference import random_weights
from support.wide_models import wide_folders
from triton.runtime.interpreter import InterpretedFunction

from asyncengine.config import EngineConfig
from asyncengine.execution.attention import flashinfer
from asyncengine.execution.layers import kernels, options, rotary, weight_forms
from asyncengine.execution.layers.kernels import CudaKernels
from asyncengine.execution.models import loading
from asyncengine.execution.models.decoder import Decoder
from asyncengine.lora.layers import slots
from asyncengine.lora.layers.slots import LoraLayers

CPU = torch.device("cpu")


class CountedFlashInfer(FakeFlashInfer):
    """The stand-in, each of whose kernels counts as one launch."""

    def __init__(self, launches: Launches) -> None:
        super().__init__(FakeMemory())
        self.launches = launches

    def silu_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        with self.launches.kernel("silu_and_mul"):
            return super().silu_and_mul(input)

    def gelu_tanh_and_mul(self, input: torch.Tensor) -> torch.Tensor:
        with self.launches.kernel("gelu_tanh_and_mul"):
            return super().gelu_tanh_and_mul(input)


def use_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> CountedFlashInfer:
    """Models loaded and FlashInfer backends made from now on have them; `launches` of the result count."""
    fake = CountedFlashInfer(Launches())
    for module in (flashinfer, kernels, rotary, weight_forms, slots):
        monkeypatch.setattr(module, "triton_missing", lambda device: None)
    for module in (options, rotary):
        monkeypatch.setattr(module, "compiler_missing", lambda *_: "as on a GPU")
    monkeypatch.setattr(loading, "layer_kernels", lambda *_: CudaKernels(fake, CPU))
    counted = (InterpretedFunction, "run", lambda self, *_: self.fn.__name__), (Wrapper, "launch", lambda _, name: name)
    for owner, method, name_of in counted:
        monkeypatch.setattr(owner, method, _counted(getattr(owner, method), name_of, fake.launches))
    return fake


def _counted(method: Callable[..., Any], name_of: Callable[..., str], launches: Launches) -> Callable[..., Any]:
    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        with launches.kernel(name_of(self, *arguments[:1])):
            if launches.only_counts and isinstance(self, InterpretedFunction):
                return None
            return method(self, *arguments, **options)

    return run


LAYERS = 3
IDS = [3, 17, 40, 9, 3, 3, 88]
OUTER = {"_angles": 1, "_rms_norm": 1}
"""Launches before the layers and behind them, beside the lookup of the token and the output layer."""
LAYER = {"_rms_norm": 2, "_prepare_and_write": 1, "decode": 1}


folder = pytest.fixture(wide_folders, scope="module")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> CountedFlashInfer:
    return use_cuda_kernels(monkeypatch)


def load(folder: Callable[[str], Path], name: str, dtype: str = "float32") -> Decoder:
    model = loading.load_model(str(folder(name)), EngineConfig(device="cpu", dtype=dtype, show_progress=False)).model
    assert isinstance(model, Decoder)
    return model


def on_flashinfer(model: Decoder, fake: CountedFlashInfer, rows: int = 1) -> Forwards:
    made = Forwards(model, rows, backend="torch", most=20)
    made.backend = make_flashinfer(model.specs, fake, dtype=model.dtype)
    return made


@pytest.mark.parametrize("name", ["llama", "gemma2", "llama4"])
def test_kernels_change_no_answer(name: str, folder: Callable[[str], Path], request: pytest.FixtureRequest) -> None:
    plain = load(folder, name)
    fake = request.getfixturevalue("fake")
    model = load(folder, name)
    assert model.recorded is None
    expected, found = Forwards(plain, backend="torch"), on_flashinfer(model, fake)
    for ids in (IDS, [5], [6, 7]):
        logits = expected.step(ids)
        torch.testing.assert_close(found.step(ids), logits, rtol=0.0, atol=2e-5 * float(logits.abs().max()))
    assert (fake.calls["prefill"], fake.calls["decode"]) == (2 * len(model.layers), len(model.layers))
    assert fake.calls["append"] == (6 if name == "llama4" else 0), "two of its layers have norms behind the rotation"


def test_products_of_one_row(folder: Callable[[str], Path], request: pytest.FixtureRequest) -> None:
    """Products of one row are rounded otherwise: bfloat16 has as many digits as may differ."""
    plain = load(folder, "qwen3", "bfloat16")
    fake = request.getfixturevalue("fake")
    expected, found = Forwards(plain, backend="torch"), on_flashinfer(load(folder, "qwen3", "bfloat16"), fake)
    for ids in (IDS[:5], [5]):
        logits, own = expected.step(ids).float(), found.step(ids).float()
        assert float((own - logits).abs().max()) < 0.05 * float(logits.abs().max())
    assert fake.launches.calls["_few_rows"] == 4 * LAYERS + 1


LOOKUPS = {"llama": "embedding", "qwen3": "index_select"}


@pytest.mark.parametrize(
    ("name", "rows", "layer", "outer"),
    [
        ("llama", 1, {"_few_rows": 4}, {"_few_rows": 1}),
        ("qwen3", 3, {"_few_rows": 4, "silu_and_mul": 1}, {"_few_rows": 1}),
        ("llama", 5, {"linear": 4, "silu_and_mul": 1}, {"linear": 1, "to": 1}),
        ("qwen3", 5, {"linear": 4, "silu_and_mul": 1}, {"linear": 1, "to": 1}),
    ],
)
def test_kernels_of_a_decode_step(
    name: str, rows: int, layer: dict[str, int], outer: dict[str, int], folder: Callable[[str], Path],
    fake: CountedFlashInfer,
) -> None:  # fmt: skip
    model = load(folder, name, "bfloat16")
    forwards = on_flashinfer(model, fake, rows)
    context, ids, every = forwards.context([1] * rows), torch.full((rows,), 5), torch.arange(rows)
    fake.launches.calls.clear()
    fake.launches.only_counts = True
    with torch.inference_mode(), fake.launches:
        model.forward(ids, context, every)
    wanted = Counter({LOOKUPS[name]: 1}) + Counter(OUTER) + Counter(outer)
    for _ in range(LAYERS):
        wanted += Counter(LAYER) + Counter(layer)
    assert fake.launches.calls == wanted
    assert sum(LAYER.values()) + sum(layer.values()) <= 9


HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")
EVERY = (*HEADS, "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("rows", "ends", "layer", "outer"),
    [
        (1, HEADS, {"_few_rows": 4, "_lora_few": 2}, {"_few_rows": 1}),
        (9, EVERY, {"linear": 4, "silu_and_mul": 1, "_lora_shrink": 4, "_lora_expand": 4},
         {"linear": 1, "to": 1, "_lora_tile": 1}),
    ],
)  # fmt: skip
def test_kernels_of_a_decode_step_with_adapters(
    rows: int, ends: tuple[str, ...], layer: dict[str, int], outer: dict[str, int], folder: Callable[[str], Path],
    fake: CountedFlashInfer, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Nothing is launched for products that no adapter changes; the answers are those of torch's products."""
    with_bfloat16_dots(monkeypatch)
    made: list[torch.Tensor] = []
    for launched in (True, False)[: min(rows, 2)]:
        model = load(folder, "qwen3", "bfloat16")
        if not launched:
            monkeypatch.setattr(slots, "triton_missing", lambda device: "as without Triton")
        lora = LoraLayers(model, 3, 8, masked=True)
        for slot in (1, 3):
            lora.write(slot, random_weights(lora, 8 if slot == 1 else 3, ends, size=0.3))
        forwards = on_flashinfer(model, fake, rows)
        used = torch.arange(rows) % 4 - 1 if rows > 1 else torch.tensor([2])
        used[used == 1] = 0
        context, every = forwards.context([1] * rows), torch.arange(rows)
        ids = every + 5
        fake.launches.calls.clear()
        fake.launches.only_counts = rows == 1  # answers are compared for more
        with torch.inference_mode(), fake.launches:
            tokens, wanted = lora.begin_fixed(used)
            made.append(model.forward(ids, replace(context, adapters=tokens, row_adapters=wanted), every).float())
        if launched:
            expected = Counter({"index_select": 1}) + Counter(OUTER) + Counter(outer)
            for _ in range(LAYERS):
                expected += Counter(LAYER) + Counter(layer)
            assert fake.launches.calls == expected
    assert rows == 1 or float((made[0] - made[-1]).abs().max()) < 0.05 * float(made[-1].abs().max())
