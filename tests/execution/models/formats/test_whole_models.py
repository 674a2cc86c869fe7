"""Whole small models in each format give what transformers gives with the weights that the files stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from support.drive import prompts
from support.forwards import logits_of, relative_error
from support.lora_driver import make_driver
from support.lora_reference import Weights
from support.quantized_checkpoints import KINDS, quantized
from support.tiny_models import VOCAB

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound
from asyncengine.execution.layers.stored import NumberForm, StoredForm
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import load_model
from asyncengine.execution.models.memory.needs import kept_forms
from asyncengine.execution.runner.model_memory import prepare_update
from asyncengine.seams import LoraWeights

Pair = Callable[..., tuple[Path, Path]]
QUIET = EngineConfig(show_progress=False)
IDS = [3, 17, 40, 9, 3, 3, 88, 101, 7, 61, 12, 5]


def bound(kind: str, dense: Path) -> float:
    """Largest error, as a part of the logits' norm: a hundredth, or (Gemma's norms enlarge it) what rounding x to 8
    bits costs where weights stay in small numbers; FP8 loses something in them, too."""
    cost = relative_error(oracle(dense), oracle(dense, rounded=True))
    return max(1e-2, 1.3 * cost) * (1.5 if kind.startswith("fp8") else 1.0)


def load(folder: Path, **fields: Any) -> Any:
    return load_model(str(folder), QUIET.replace(**fields))


def reference(folder: Path) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def rounded_input(module: Any, args: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """The input in 8 bits, by groups of 64."""
    grouped = args[0].unflatten(-1, (-1, 64))
    steps = grouped.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (((grouped / steps).round() * steps).flatten(-2),)


def oracle(folder: Path, rounded: bool = False) -> torch.Tensor:
    """`rounded`: with x in 8 bits wherever it is multiplied by a matrix."""
    model = reference(folder)
    for path, part in model.named_modules() if rounded else ():
        if path.endswith("_proj"):
            part.register_forward_pre_hook(rounded_input)
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize(
    ("family", "kind"),
    [*(("llama", kind) for kind in KINDS), ("qwen3", "awq"), ("gemma3", "awq"), ("qwen3", "w8a8"), ("gemma3", "w8a8"),
     ("youtu", "awq"), ("youtu", "fp8 blocks")],
)  # fmt: skip
def test_logits_are_those_of_the_dequantized_model(family: str, kind: str, pair: Pair) -> None:
    folder, dense = pair(family, kind)
    loaded = load(folder, dtype="float32")
    assert isinstance(loaded.model, Decoder)
    assert relative_error(oracle(dense), logits_of(loaded.model, IDS)) < bound(kind, dense)
    assert len(loaded.stored) == 21 + KINDS[kind].heads
    assert "model.layers.2.mlp.down_proj" in loaded.stored


def test_adapters_on_top_are_what_peft_makes_of_the_dequantized_model(pair: Pair) -> None:
    peft = pytest.importorskip("peft")
    folder, dense = pair("qwen3", "w4a16")
    base = reference(dense)
    targets = [path for path, part in base.named_modules() if isinstance(part, torch.nn.Linear) and path != "lm_head"]
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets))
    generator, modules = torch.Generator().manual_seed(2), {}
    for path, part in wrapped.base_model.model.named_modules():
        if isinstance(part, peft.tuners.lora.LoraLayer):
            a, b = part.lora_A["default"].weight.data, part.lora_B["default"].weight.data
            a.normal_(0.0, a.shape[1] ** -0.5, generator=generator)
            b.normal_(0.0, 0.1, generator=generator)
            modules[path] = LoraWeights(path, a.clone(), b * part.scaling["default"])
    driver = make_driver(lambda name: folder, "qwen3")
    driver.lora.write(1, Weights(modules))
    own, adapted = torch.tensor(driver.scores(0)), torch.tensor(driver.scores(1))
    ids = torch.tensor([prompts([30], VOCAB)[0]])
    with torch.inference_mode():
        logits = wrapped(ids, use_cache=False).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert float((adapted - expected).abs().max()) < 0.1 * float((own - expected).abs().max())


@pytest.mark.parametrize("kind", ["awq", "gptq act-order", "fp8 blocks", "w8a8"])
def test_another_checkpoint_of_the_same_form_into_a_live_model(kind: str, pair: Pair) -> None:
    """Logits are a fresh model's to the bit."""
    live, fresh = load(pair("llama", kind)[0]).model, load(pair("llama", kind, 1)[0]).model
    before = logits_of(live, IDS)
    prepare_update(live, pair("llama", kind, 1)[0], QUIET)()
    assert torch.equal(logits_of(live, IDS), logits_of(fresh, IDS))
    assert not torch.equal(logits_of(live, IDS), before)


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("awq", "gptq", "as gptq .4 bits, .*; this model keeps it as awq .4 bits"),
        ("gptq", "gptq act-order", "in an order of its own.; this model keeps it as gptq"),
        ("awq", "fp8 blocks", "as fp8 .8 bits, groups of 32"),
        ("w8a8", "", "as F32; this model keeps it as w8a8 .8 bits, a scale for each row.:"),
    ],
)
def test_another_form_is_refused_before_a_live_model_changes(
    kind: str, other: str, message: str, pair: Pair, plain: Callable[[str], Path]
) -> None:
    live = load(pair("llama", kind)[0]).model
    before = logits_of(live, IDS)
    with pytest.raises(ModelNotFound, match=message):
        prepare_update(live, pair("llama", other, 1)[0] if other else plain("llama"), QUIET)
    assert torch.equal(logits_of(live, IDS), before)


def test_float16_on_a_cpu_becomes_bfloat16(pair: Pair, plain: Callable[[str], Path], tmp_path: Path) -> None:
    """A dtype that is asked for by name stays, and so does that of a model without quantized matrices."""
    folder = quantized(plain("llama"), tmp_path / "a", "awq", dtype="float16")
    assert load(folder).dtype == torch.bfloat16
    assert load(folder, dtype="float16").dtype == torch.float16


def test_what_stays_as_it_is_stored() -> None:
    """int8 and int4 round what is stored wider, and nothing else."""
    stored = {name: StoredForm(name, NumberForm(bits, 32)) for name, bits in (("a", 4), ("b", 6), ("c", 8))}
    cpu = torch.device("cpu")
    assert [list(kept_forms(stored, torch.bfloat16, cpu, bits)) for bits in (None, 8, 4)] == [
        ["a", "b", "c"], ["a", "b", "c"], ["a"],
    ]  # fmt: skip
    assert kept_forms(stored, torch.float16, cpu, None) == {}
