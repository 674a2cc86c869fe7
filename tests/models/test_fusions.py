"""Fused forms equal what they replace, are refused where they would not, and are never shared between models."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint, MakeRunner
from support.drive import Driver, greedy_reference, prompts
from support.tiny_models import FAMILIES, VOCAB, make_model
from torch import nn

from asyncengine.config import EngineConfig
from asyncengine.cpu import compiler_missing
from asyncengine.models.families import run_recorded
from asyncengine.models.fusions import _called_in_order
from asyncengine.models.linears import FastLinear, can_pack
from asyncengine.models.loading import load_model
from asyncengine.models.probing import same
from asyncengine.models.rotary import fuse_rotary

CPU = torch.device("cpu")
EXPECTED = {
    "llama": {"gate_up": 3, "qkv": 3, "rms_norm": 7, "rope": 3, "layer": 3, "forward": 1},
    "gemma3": {"gate_up": 3, "qkv": 3, "rms_norm": 19, "rope": 3, "layer": 3, "forward": 1},
    "phi3": {"rms_norm": 7, "rope": 3, "layer": 3, "forward": 1},
    "gpt-oss": {"qkv": 3, "rms_norm": 7, "layer": 3, "forward": 1},
    "opt": {"qkv": 3},
    "gpt2": {},
}
COMPILED = ("rms_norm", "gate_up")
"""What compiled kernels take wherever there is a compiler, and count once more."""


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_fused(name: str, checkpoint: Checkpoint) -> None:
    fused = dict(entry.split(" x ") for entry in load_model(str(checkpoint(name)), EngineConfig()).fused)
    packed = int(fused.pop("packed_linear", "0"))
    for part in ("merged_attention", "output_layer"):  # see the tests of these
        fused.pop(part, None)
    expected = dict(EXPECTED[name])
    if compiler_missing(torch.float32, CPU) is None:
        expected |= {f"{part} kernel": expected[part] for part in COMPILED if part in expected}
    assert {key: int(count) for key, count in fused.items()} == expected
    if can_pack(torch.float32, CPU) and name != "gpt2":
        assert packed >= 6


@pytest.mark.parametrize("name", list(FAMILIES))
def test_fused_logits_equal_plain_ones(name: str, checkpoint: Checkpoint) -> None:
    logits = []
    for fuse in (True, False):
        model = load_model(str(checkpoint(name)), EngineConfig(fuse=fuse))
        logits.append(run_recorded(model.module, CPU)[0])
    assert torch.allclose(*logits, atol=2e-5 * float(logits[1].abs().max()))


def test_same_tells_apart() -> None:
    x = torch.randn(5, 5)
    assert same(x, x * (1 + 1e-7))
    assert not same(x, x * 1.001)
    assert not same(x, x[:4])
    assert not same(x, x.bfloat16())


class Attention(nn.Module):
    """Calls its projections in a given order."""

    def __init__(self, order: str) -> None:
        super().__init__()
        self.order = order
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = {"q": self.q_proj, "k": self.k_proj, "v": self.v_proj}
        return sum((parts[key](x) if key != "K" else self.k_proj(x + 1) for key in self.order), torch.zeros(()))


@pytest.mark.parametrize(
    ("order", "ok"), [("qkv", True), ("kqv", False), ("qkvk", False), ("qv", False), ("qKv", False)]
)
def test_merging_needs_the_right_order_and_input(order: str, ok: bool) -> None:
    module = Attention(order)
    assert bool(_called_in_order([module], lambda: module(torch.ones(1, 4)))) == ok


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear(dtype: torch.dtype, bias: bool) -> None:
    if not can_pack(dtype, CPU):
        pytest.skip("oneDNN has no packed linear for this type here")
    weight, offset = torch.randn(33, 17).to(dtype), torch.randn(33).to(dtype) if bias else None
    packed = FastLinear(weight, offset, pack=True)
    for shape in ((1, 1, 17), (1, 40, 17), (3, 17), (0, 17)):
        x = torch.randn(shape).to(dtype)
        found, expected = packed(x), nn.functional.linear(x, weight, offset)
        assert found.shape == expected.shape
        assert torch.allclose(
            found.float(),
            expected.float(),
            rtol=2e-2 if dtype == torch.bfloat16 else 1e-5,
            atol=1e-1 if dtype == torch.bfloat16 else 1e-5,
        )


def test_rotary_candidates_that_differ_are_left_alone() -> None:
    """Cohere rotates neighbours, not halves; gpt-oss has tables of half the size."""
    for name, expected in (("llama", 3), ("cohere", 0), ("gpt-oss", 0)):
        model = make_model(name)
        attention = [part for part in model.modules() if hasattr(part, "q_proj")]
        assert fuse_rotary(attention, same, torch.float32, CPU) == expected


def test_the_process_is_not_patched(checkpoint: Checkpoint) -> None:
    """After loading fused models, transformers' own code computes what it always did."""
    from transformers.models.llama import modeling_llama

    before = (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward)
    load_model(str(checkpoint("llama")), EngineConfig())
    assert (modeling_llama.apply_rotary_pos_emb, modeling_llama.LlamaAttention.forward) == before


def test_two_engines_in_two_threads(make_runner: MakeRunner) -> None:
    """Different models, same process, at the same time."""
    names = ["llama", "gemma2", "llama"]
    prompt = prompts([14], VOCAB)[0]
    expected = [greedy_reference(make_model(name), prompt, 25) for name in names]
    runners = [make_runner(name) for name in names]
    start = threading.Barrier(len(names))
    outputs: dict[int, list[list[int]]] = {}

    def work(index: int, runner: Any) -> None:
        driver = Driver(runner)
        start.wait(60)
        outputs[index] = [driver.run([driver.job(prompt, 25)], chunk=5)[0] for _ in range(3)]

    threads = [threading.Thread(target=work, args=item) for item in enumerate(runners)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [outputs[index] for index in range(len(names))] == [[output] * 3 for output in expected]
