"""Fused forms equal what they replace, are refused where they would not, and are never shared between models."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from asyncengine.models.fusions import _called_in_order
from asyncengine.models.linears import FastLinear, PanelLinear, can_pack
from asyncengine.models.probing import same
from asyncengine.models.rotary import fuse_rotary
from support.checkpoints import Checkpoint, MakeRunner
from support.drive import Driver, greedy_reference, prompts
from support.panels import use_panels
from support.tiny_models import FAMILIES, VOCAB, make_model
from torch import nn

from asyncengine.config import EngineConfig
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.models.families import run_recorded
from asyncengine.models.loading import load_model

CPU = torch.device("cpu")
EXPECTED = {
    "llama": {"gate_up": 3, "qkv": 3, "rms_norm": 7, "rope": 3, "layer": 3, "forward": 1},
    "gemma3": {"gate_up": 3, "qkv": 3, "rms_norm": 19, "rope": 3, "layer": 3, "forward": 1},
    "phi3": {"rms_norm": 7, "rope": 3, "layer": 3, "forward": 1},
    "gpt-oss": {"qkv": 3, "rms_norm": 7, "layer": 3, "forward": 1},
    "opt": {"qkv": 3},
    "gpt2": {},
}
PANELS = {"llama": 6, "gemma3": 6, "phi3": 6, "gpt-oss": 3}
"""Linears whose outputs fill panels: queries with keys and values, gates with what they gate. Half of all there are."""
COMPILED = ("rms_norm", "gate_up")
"""What compiled kernels take wherever there is a compiler, and count once more."""


def load(folder: Path, **fields: Any) -> Any:
    return load_model(str(folder), EngineConfig(**fields))


def counts(model: Any) -> dict[str, int]:
    return {name: int(count) for name, count in (entry.split(" x ") for entry in model.fused)}


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_fused(name: str, panels: bool, checkpoint: Checkpoint) -> None:
    model = load(checkpoint(name))
    fused = counts(model)
    in_panels, packed = fused.pop("panel_linear", 0), fused.pop("packed_linear", 0)
    for part in ("merged_attention", "output_layer"):  # see the tests of these
        fused.pop(part, None)
    expected = dict(EXPECTED[name])
    if compiler_missing(torch.float32, CPU) is None:
        expected |= {f"{part} kernel": expected[part] for part in COMPILED if part in expected}
    assert fused == expected
    linears = {"opt": 12, "gpt2": 0}.get(name, 2 * PANELS.get(name, 0))
    linears += type(model.module.get_output_embeddings()) is FastLinear  # as there is no compiler
    assert in_panels == (PANELS.get(name, 0) if panels else 0)
    assert packed == (linears - in_panels if can_pack(torch.float32, CPU) else 0)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_fused_logits_equal_plain_ones(name: str, panels: bool, checkpoint: Checkpoint) -> None:
    fused, plain = (run_recorded(load(checkpoint(name), fuse=fuse).module, CPU)[0] for fuse in (True, False))
    assert torch.allclose(fused, plain, atol=2e-5 * float(plain.abs().max()))


def test_bfloat16_in_panels(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight of the model's type is left but norms and what does not fill panels."""
    use_panels(True, monkeypatch)
    folder = checkpoint("stablelm")  # every width fills panels
    fused, plain = (load(folder, dtype="bfloat16", fuse=fuse) for fuse in (True, False))
    assert counts(fused)["panel_linear"] == 12
    assert "packed_linear" not in counts(fused)
    kinds = [type(part) for part in fused.module.modules() if isinstance(part, (nn.Linear, FastLinear))]
    assert kinds == [PanelLinear] * 13
    found, expected = (run_recorded(model.module, CPU)[0].float() for model in (fused, plain))
    assert torch.allclose(found, expected, atol=5e-2 * float(expected.abs().max()))


@pytest.mark.parametrize("broken", ["raises", "differs"])
def test_panels_that_cannot_be_had(
    broken: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Every linear is what it would be on a machine without them; what raises is asked once, not for each linear."""
    pytest.importorskip("numba")
    from asyncengine.kernels.cpu import packed as panel_kernels

    use_panels(False, monkeypatch)
    expected = load(checkpoint("llama"))
    asked: list[int] = []

    def product(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
        asked.append(out.shape[-1])
        if broken == "raises":
            raise RuntimeError("unknown CPU")
        out.zero_()

    monkeypatch.setattr(panel_kernels, "gemm", product)
    use_panels(True, monkeypatch)
    model = load(checkpoint("llama"))
    output_layer = {} if broken == "differs" else {"output_layer": 0, "packed_linear": 13}
    if can_pack(torch.float32, CPU):
        assert {"output_layer": 0, **counts(model)} == {**counts(expected), **output_layer}
    assert not any(isinstance(part, PanelLinear) for part in model.module.modules())
    found, wanted = (run_recorded(each.module, CPU)[0] for each in (model, expected))
    assert torch.allclose(found, wanted, atol=1e-4)
    assert len(asked) == (2 if broken == "raises" else 7)
    assert ("products are oneDNN's: RuntimeError: unknown CPU" in caplog.text) == (broken == "raises")


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
