"""Weights in 8 and 4 bits: what is replaced, what it costs in accuracy and memory, adapters on top, and refusals."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import Checkpoint, MakeRunner
from support.drive import Driver, prompts
from support.lora_driver import make_driver
from support.lora_reference import Reference
from support.tiny_models import VOCAB
from torch import nn

from asyncengine import AsyncEngine, Engine, EngineConfig, InvalidParameter, SamplingParams, UnsupportedModel
from asyncengine.demo import MODEL_PATH
from asyncengine.lora.layers.targets import find_places
from asyncengine.models import quantized
from asyncengine.models.families import run_recorded
from asyncengine.models.linears import FastLinear
from asyncengine.models.loading import load_model
from asyncengine.models.output_layer import SharedEmbedding
from asyncengine.models.quantized import QuantizedLinear, quantization_bits, relative_error

pytest.importorskip("numba")

CPU = torch.device("cpu")
BOTH = ("int8", "int4")
GREEDY = SamplingParams(temperature=0.0, max_tokens=60)
QUESTIONS = {
    "What is the capital of Norway?": "Oslo",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Peru?": "Lima",
}


def load(folder: Path, **fields: Any) -> Any:
    return load_model(str(folder), EngineConfig(show_progress=False, **fields))


def linears(module: Any) -> list[Any]:
    return [part for part in module.modules() if type(part) in (nn.Linear, FastLinear)]


# ---------------------------------------------------------------- the linear


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(bits: int, dtype: torch.dtype) -> None:
    weight, bias = torch.randn(33, 100).to(dtype), torch.randn(33).to(dtype)
    made = QuantizedLinear(weight, bias, bits)
    assert (made.in_features, made.out_features) == (100, 33)
    for shape in ((1, 1, 100), (1, 40, 100), (3, 100), (0, 100)):
        x = torch.randn(shape).to(dtype)
        found, expected = made(x), nn.functional.linear(x, weight, bias)
        assert (found.shape, found.dtype) == (expected.shape, dtype)
        assert relative_error(expected, found) < (0.02 if bits == 8 else 0.15) or not x.numel()


def test_linear_for_logits_is_float32_and_keeps_what_is_held() -> None:
    made = QuantizedLinear(torch.randn(20, 64).bfloat16(), None, 8, logits=True)
    x = torch.randn(1, 3, 64).bfloat16()
    first = made(x)
    kept = first.clone()
    assert first.dtype == torch.float32
    made(-x)
    assert torch.equal(first, kept)


def test_embedding_reads_rows_of_the_output_layer() -> None:
    weight = torch.randn(50, 64)
    table = SharedEmbedding(QuantizedLinear(weight, None, 8, logits=True), torch.float32)
    ids = torch.tensor([[0, 49, 7]])
    assert table(ids).shape == (1, 3, 64)
    assert relative_error(weight[ids], table(ids)) < 0.01
    assert table.weight.shape == (50, 64)
    assert table(ids[:, :0]).shape == (1, 0, 64)
    for wrong in (50, -1):
        with pytest.raises(IndexError, match="token ids"):
            table(torch.tensor([wrong]))


# ---------------------------------------------------------------- models


@pytest.mark.parametrize("quantization", BOTH)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "phi3", "opt"])
def test_every_linear_of_a_model_is_replaced(name: str, quantization: str, checkpoint: Checkpoint) -> None:
    model = load(checkpoint(name), quantization=quantization)
    assert not linears(model.module)
    assert any(entry.startswith(f"{quantization}_linear") for entry in model.fused)
    head = model.module.get_output_embeddings()
    assert head.bits == 8, "the output layer stays in 8 bits"
    table = model.module.get_input_embeddings()
    assert isinstance(table, SharedEmbedding) == (model.hf_config.tie_word_embeddings and name != "gemma3")
    plain = load(checkpoint(name))
    assert [place.parts for place in find_places(model.module)] == [place.parts for place in find_places(plain.module)]
    expected, found = (run_recorded(each.module, CPU)[0] for each in (plain, model))
    assert relative_error(expected, found) < (0.1 if quantization == "int8" else 0.6)


def test_without_fusing(checkpoint: Checkpoint) -> None:
    model = load(checkpoint("qwen3"), quantization="int8", fuse=False)
    assert not linears(model.module)
    assert any(entry.startswith("int8_linear") for entry in model.fused)


def test_a_linear_that_does_not_stand_it_is_kept(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantized._ERROR, 4, 0.0)
    model = load(checkpoint("qwen3"), quantization="int4")
    assert "linear kept as it is x 12" in model.fused
    assert len(linears(model.module)) == 12


def test_a_model_that_does_not_stand_it_is_refused(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quantized._LOGITS_ERROR, 4, 1e-9)
    with pytest.raises(UnsupportedModel, match="does not stand 4-bit weights"):
        load(checkpoint("qwen3"), quantization="int4")


@pytest.mark.parametrize("quantization", BOTH)
def test_whoever_shares_the_batch(quantization: str, make_runner: MakeRunner) -> None:
    """The same tokens alone, together, in chunks and after preemption."""
    inputs = prompts([5, 33, 18], VOCAB)
    driver = Driver(make_runner("qwen3", quantization=quantization))

    def jobs() -> list[Any]:
        return [driver.job(prompt, 20) for prompt in inputs]

    together = driver.run(jobs())
    assert driver.run(jobs(), 7) == together
    assert driver.run(jobs(), 16, preempt_every=5) == together
    assert [driver.run([job])[0] for job in jobs()] == together


def test_the_model_is_not_held_twice(checkpoint: Checkpoint) -> None:
    """No weight in the model's type is left but norms, and what is reported is what there is."""
    model = load(checkpoint("qwen3"), quantization="int4")
    gc.collect()
    assert all(part.dim() == 1 for part in model.module.parameters())
    plain = load(checkpoint("qwen3"))
    assert model.weights_bytes < 0.4 * plain.weights_bytes
    held = [part for part in model.module.modules() if isinstance(part, QuantizedLinear)]
    norms = sum(part.nbytes for part in model.module.parameters())
    assert model.weights_bytes == norms + sum(part.nbytes for part in held)


# ---------------------------------------------------------------- adapters


@pytest.mark.parametrize("quantization", BOTH)
def test_adapters_add_to_the_quantized_product(quantization: str, checkpoint: Checkpoint) -> None:
    """Scores of a prompt with each adapter are near those without quantization, far from another adapter's."""
    pytest.importorskip("peft")
    adapters = Reference("qwen3").adapters[:2]
    scores = []
    for fields in ({}, {"quantization": quantization}):
        driver = make_driver(checkpoint, "qwen3", **fields)
        for slot, adapter in enumerate(adapters, 1):
            driver.lora.write(slot, adapter)
        scores.append(torch.tensor([driver.scores(slot) for slot in range(3)]))
    plain, found = scores
    apart = torch.cdist(plain, found)
    assert apart.argmin(1).tolist() == [0, 1, 2]
    if quantization == "int8":
        assert float(apart.diagonal().max()) < 0.3 * float(apart[0, 1:].min())


# ---------------------------------------------------------------- the demo model


@pytest.mark.parametrize("quantization", BOTH)
async def test_the_demo_model_answers(quantization: Any) -> None:
    engine = await AsyncEngine.from_pretrained(
        "demo", quantization=quantization, adapters={"pirate": "demo/pirate"}, kv_cache_memory="32MiB",
        show_progress=False, num_threads=1,
    )  # fmt: skip
    async with engine:
        for question, answer in QUESTIONS.items():
            done = await engine.chat([{"role": "user", "content": question}], GREEDY)
            assert answer in done.text
        done = await engine.chat([{"role": "user", "content": next(iter(QUESTIONS))}], GREEDY, adapter="pirate")
        assert "Arr" in done.text


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("value", ["int2", "", 8, True, "fp8"])
def test_unknown_names(value: Any) -> None:
    with pytest.raises(InvalidParameter, match="quantization: must be one of 'int8', 'int4'"):
        EngineConfig(quantization=value)


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [(torch.float16, "cpu", "not float16"), (torch.bfloat16, "cuda", "on the CPU, not on cuda")],
)
def test_where_it_cannot_be_used(dtype: torch.dtype, device: str, reason: str) -> None:
    with pytest.raises(InvalidParameter, match=f"quantization: cannot be used here: .*{reason}"):
        quantization_bits(EngineConfig(quantization="int8"), dtype, torch.device(device))


def test_refused_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncengine.models.loading._load_module", None)
    with pytest.raises(InvalidParameter, match="quantization"):
        Engine.from_pretrained(str(MODEL_PATH), quantization="int4", dtype="float16", show_progress=False)


def test_a_family_without_linears(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized.Quantizer, "_quantized", lambda *_, **__: None)
    with pytest.raises(UnsupportedModel, match="no linear layers"):
        load(checkpoint("qwen3"), quantization="int8")
