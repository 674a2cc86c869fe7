"""Mixtures in whole models: other spellings of checkpoints, rounded weights, adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.checkpoints import Checkpoint
from support.forwards import logits_of
from support.gguf_files import checkpoint_of, write_gguf
from support.quantized_checkpoints import mxfp4
from support.reachable import tensors_in
from support.tiny_models import make_model

from asyncengine.config import EngineConfig
from asyncengine.errors import AdapterError
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.loading import load_model

QUIET = EngineConfig(show_progress=False)
IDS = [3, 17, 40, 9, 3, 3, 88, 120, 54, 7, 91]


def load(folder: Path, **fields: Any) -> Decoder:
    model = load_model(str(folder), QUIET.replace(**fields)).model
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen2moe", "qwen3moe", "granitemoe", "phimoe", "glm4moe", "ernie4.5moe", "minimax-m2"]
)
def test_both_spellings(name: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A tensor for each expert, as on the hub, and one for all of them, as transformers has them in memory."""
    make_model(name).save_pretrained(tmp_path / "other", save_original_format=False)
    expected = load(checkpoint(name))
    other = load(tmp_path / "other")
    assert torch.equal(logits_of(other, IDS), logits_of(expected, IDS))
    assert other.nbytes == expected.nbytes


@pytest.mark.parametrize("quantization", [None, "int4"])
@pytest.mark.parametrize("name", ["qwen2moe", "glm4moe", "granitemoe"])
def test_every_weight_is_counted_once(name: str, quantization: Any, checkpoint: Checkpoint) -> None:
    if quantization is not None:
        pytest.importorskip("numba")
    model = load(checkpoint(name), quantization=quantization)
    held = tensors_in([model.layers, model.head, model.embedding, model.norm])
    assert model.nbytes == sum(part.nbytes for part in held)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("name", ["qwen3moe", "mixtral", "gpt-oss"])
def test_rounded_weights(name: str, quantization: Any, checkpoint: Checkpoint) -> None:
    """Near the model's own numbers, in one block (qwen3moe, gpt-oss) and expert by expert (mixtral)."""
    pytest.importorskip("numba")
    model, exact = load(checkpoint(name), quantization=quantization), logits_of(load(checkpoint(name)), IDS)
    assert f"{quantization} experts x 3" in model.describe()
    found = logits_of(model, IDS)
    # the random router has near ties: where one is chosen otherwise, a row is another one
    errors = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert float(errors.median()) < {"int8": 0.05, "int4": 0.6}[quantization]


def test_experts_of_a_gguf_file(tmp_path: Path) -> None:
    """All of them in one tensor of the file; as they are stored, in one block."""
    pytest.importorskip("numba")
    reference = make_model("qwen3moe")
    weights = checkpoint_of(reference, tmp_path / "there")
    stored = write_gguf(
        tmp_path / "m.gguf", reference.config, weights, lambda name, _: "Q8_0" if "exps" in name else "F32"
    )  # fmt: skip
    model = load(tmp_path / "m.gguf")
    assert "Q8_0 experts x 3" in model.describe()
    assert all(layer.mixtures()[0].experts.compiled for layer in model.layers)
    reference.load_state_dict(stored, strict=False)
    assert row_error(model, reference) < 0.03


def test_gpt_oss_experts_in_mxfp4(checkpoint: Checkpoint, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    reference, folder = make_model("gpt-oss"), tmp_path / "m"
    shutil.copytree(checkpoint("gpt-oss"), folder)
    tensors, dense = dict(reference.state_dict()), {}
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        written = mxfp4(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_{part}": tensor for part, tensor in written.tensors.items()}
        dense[name] = written.dense.transpose(1, 2).contiguous()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder, dtype="float32")
    assert "mxfp4 (exact) experts x 3" in model.describe()
    assert all(layer.mixtures()[0].experts.compiled for layer in model.layers)
    reference.load_state_dict(dense, strict=False)
    assert row_error(model, reference) < 0.03


def row_error(model: Decoder, reference: Any) -> float:
    """Error of most rows: where a random router has a near tie, another expert may be chosen."""
    with torch.inference_mode():
        exact = reference(torch.tensor([IDS]), use_cache=False).logits[0]
    return float(((logits_of(model, IDS) - exact).norm(dim=-1) / exact.norm(dim=-1)).median())


def test_adapters_of_experts_are_refused_by_name(checkpoint: Checkpoint) -> None:
    """Adapters of attention and of shared experts are not refused."""
    from support.lora_reference import Weights

    from asyncengine.lora.layers.slots import LoraLayers

    model = load(checkpoint("qwen2moe"))
    lora = LoraLayers(model, 1, 4)
    assert "model.layers.0.mlp.shared_expert.up_proj" in lora.modules
    assert not [path for path in lora.modules if ".experts." in path]
    name = "model.layers.0.mlp.experts.1.up_proj"
    with pytest.raises(AdapterError, match=name):
        lora.write(1, Weights({name: (torch.zeros(4, 48), torch.zeros(32, 4))}))
