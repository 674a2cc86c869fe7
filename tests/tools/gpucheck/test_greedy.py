"""Greedy outputs against transformers: right ones pass, and a model that is a little off does not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tools.gpucheck import greedy
from tools.gpucheck.families import families, make_adapter, make_checkpoint, random_model
from tools.gpucheck.reference import Gap, Reference, merge_adapter
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session, Settings

FAMILIES = {family.name: family for family in families()}
CPU = torch.device("cpu")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(Settings("cpu", "torch", quick=True, seed=5), tmp_path)


@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("gemma2", "bfloat16")])
def test_families_pass(name: str, dtype: str, session: Session) -> None:
    found = asyncio.run(greedy.check_family(session, FAMILIES[name], dtype, 8))
    assert found.endswith("on torch")
    assert found.startswith("64 tokens the same") or dtype == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_weights_fail(dtype: str, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads the checkpoint before one layer's output is weakened by a tenth."""
    kept = Reference.generate

    def then_change(self: Reference, *arguments: Any) -> list[list[int]]:
        found = kept(self, *arguments)
        file = session.folder / f"qwen3-{dtype}" / "model.safetensors"
        tensors = load_file(file)
        tensors["model.layers.1.self_attn.o_proj.weight"] *= 0.9
        save_file(tensors, file, metadata={"format": "pt"})
        return found

    monkeypatch.setattr(Reference, "generate", then_change)
    told = "outputs differ" if dtype == "float32" else "outputs differ|times what transformers' are"
    with pytest.raises(CheckFailed, match=told):
        asyncio.run(greedy.check_family(session, FAMILIES["qwen3"], dtype, 24))


def test_heads_have_the_size_that_kernels_take() -> None:
    for family in FAMILIES.values():
        config = family.make(True)
        heads = config.num_attention_heads
        assert getattr(config, "head_dim", None) or config.hidden_size // heads == 64, family.name


def test_a_gap_is_measured_in_float32(tmp_path: Path) -> None:
    """Rounding is what the served type changes; the gap is that of the true logits."""
    folder = make_checkpoint(FAMILIES["llama"].make(True), tmp_path / "m", torch.bfloat16, 1)
    reference = Reference(folder, torch.bfloat16, CPU)
    model = random_model(FAMILIES["llama"].make(True), 1).to(torch.bfloat16)
    with torch.inference_mode():
        truth = model.float()(input_ids=torch.tensor([[3, 4, 5]])).logits[0, -1]
    best, second = truth.topk(2).indices.tolist()
    found = reference.gap([3, 4, 5], best, second)
    assert found.gap == pytest.approx(float(truth[best] - truth[second]), abs=1e-4)
    assert 0 < found.rounding < 1
    exact = Reference(folder, torch.float32, CPU).gap([3, 4, 5], best, second)
    assert exact.rounding == 0
    assert not exact.near_tie


def test_in_float32_a_near_tie_is_a_ten_thousandth(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = object.__new__(Reference)
    for gap, verdict in ((0.9e-4, True), (1.1e-4, False)):
        monkeypatch.setattr(reference, "gap", lambda *_, gap=gap: Gap(gap, 0.0), raising=False)
        assert reference.exact_gap([1], 2, 3).near_tie is verdict


def test_merging_is_what_peft_does(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder = make_checkpoint(FAMILIES["qwen3"].make(True), tmp_path / "m", torch.float32, 1)
    adapter = make_adapter(folder, tmp_path / "a", 2)
    model = random_model(FAMILIES["qwen3"].make(True), 1)
    wrapped = peft.PeftModel.from_pretrained(random_model(FAMILIES["qwen3"].make(True), 1), adapter)
    tokens = torch.tensor([[7, 8, 9, 10]])
    with torch.inference_mode():
        before = model(input_ids=tokens).logits
        merge_adapter(model, adapter)
        after, wanted = model(input_ids=tokens).logits, wrapped(input_ids=tokens).logits
    assert float((after - wanted).abs().max()) < 1e-3
    assert float((after - before).abs().max()) > 0.1, "an adapter that changes nothing proves nothing"
