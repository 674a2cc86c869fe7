"""Hybrids in GGUF files: configuration, tensors and logits are those of transformers with what the file stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.forwards import Forwards
from support.gguf_hybrids import write_hybrid
from support.gguf_models import changed, make_model
from support.gguf_reading import LENGTH, check_tensors, decoder_of
from transformers import AutoConfig

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound
from asyncengine.layers.stored import dense
from asyncengine.models.families import decoder_config_of
from asyncengine.models.formats.gguf.model import open_gguf
from asyncengine.models.formats.gguf.tensors import BlockMatrix
from asyncengine.models.loading import load_model

IDS = list(range(3, 24))
LFM = {"conv_bias": False, "hidden_size": 64, "intermediate_size": 96, "block_auto_adjust_ff_dim": False}
CASES: dict[str, Any] = {
    "qwen3.5": changed("qwen3.5"),
    "qwen3.5 of equal heads": changed("qwen3.5", linear_num_key_heads=4, linear_num_value_heads=4),
    "qwen3.5moe": changed("qwen3.5moe"),
    "lfm2": changed("lfm2", **LFM),
    "granite4": changed("granite4"),
    "granite4, dense and rotated": changed("granite4", num_local_experts=0, position_embedding_type="rope"),
    "lfm2moe": changed("lfm2moe", **LFM, routed_scaling_factor=1.0),
}


def put(reference: Any, written: dict[str, torch.Tensor]) -> None:
    """Into a model of transformers', whose experts are joined."""
    own = dict(written)
    for path, parameter in reference.named_parameters():
        if ".block_sparse_moe." in path:
            old = path.replace("experts.gate_up_proj", "input_linear.weight").replace(
                "router.weight", "router.layer.weight"
            )
            own[path] = own.pop(old.replace("experts.down_proj", "output_linear.weight"))
            continue
        stem, _, part = path.rpartition(".")
        if not stem.endswith(".experts"):
            continue
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[part]
        if ".feed_forward." in path:
            names = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[part]
        every = [[own.pop(f"{stem}.{index}.{name}.weight") for name in names] for index in range(len(parameter))]
        own[path] = torch.stack([torch.cat(parts) for parts in every])
    missing, unexpected = reference.load_state_dict(own, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", CASES)
def test_comes_back(name: str, kind: str, tmp_path: Path) -> None:
    config = CASES[name]()
    reference = make_model(config)
    written = write_hybrid(
        tmp_path / "m.gguf", config, dict(reference.state_dict()),
        lambda _, tensor: kind if tensor.shape[-1] % 32 == 0 else "F32",
    )  # fmt: skip
    model = open_gguf(tmp_path / "m.gguf")
    check_tensors(model, written)
    fields = dict(model.config)
    assert fields["model_type"] == config.model_type
    back = AutoConfig.for_model(fields.pop("model_type"), **fields)
    assert str(decoder_config_of(back, LENGTH)) == str(decoder_config_of(config, LENGTH))
    put(reference, written)
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS]), use_cache=False).logits[0]
    meant = Forwards(decoder_of(model), most=len(IDS)).step(IDS)
    torch.testing.assert_close(meant, expected, rtol=0.0, atol=2e-5 * float(expected.abs().max()))
    loaded = load_model(str(tmp_path / "m.gguf"), EngineConfig(show_progress=False, dtype="float32")).model
    found = Forwards(loaded, most=len(IDS)).step(IDS)
    error = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.median()) < (2e-5 if kind == "F32" else 0.1)  # what rounding x costs such weights
    if kind == "Q8_0" and name == "qwen3.5":  # columns of quantized matrices, in another order as they are
        matrix = model.read("model.layers.0.linear_attn.out_proj.weight")
        assert isinstance(matrix, BlockMatrix)
        assert matrix.order is not None
        assert torch.equal(dense(matrix), written["model.layers.0.linear_attn.out_proj.weight"])


def put_value(writer: Any, key: str, value: Any) -> None:
    """In the place of what the header has under that key."""
    values, name = writer.kv_data[0], f"{writer.arch}.{key}"
    values.pop(name, None)
    (writer.add_array if isinstance(value, list) else writer.add_uint32)(name, value)


def test_layers_that_only_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    config = CASES["qwen3.5"]()
    layers = config.num_hidden_layers

    def change(writer: Any) -> None:
        put_value(writer, "block_count", layers + 1)
        put_value(writer, "nextn_predict_layers", 1)
        for name in ("attn_q.weight", "nextn.eh_proj.weight", "nextn.enorm.weight"):
            writer.add_tensor(f"blk.{layers}.{name}", torch.zeros(2, 3).numpy())

    written = write_hybrid(tmp_path / "m.gguf", config, dict(make_model(config).state_dict()), change=change)
    model = open_gguf(tmp_path / "m.gguf")
    check_tensors(model, written)
    assert model.config["num_hidden_layers"] == layers
    assert model.config["layer_types"] == config.layer_types


def test_qwen35_as_ollama_makes_it(tmp_path: Path) -> None:
    """Layers without attention have no heads of keys; other parts lie in the same file."""
    config = CASES["qwen3.5"]()

    def change(writer: Any) -> None:
        writer.kv_data[0].pop("qwen35.attention.recurrent_layers")
        heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        put_value(writer, "attention.head_count_kv", heads)
        for name in ("v.blk.0.attn_q.weight", "mtp.layers.0.attn_q.weight"):
            writer.add_tensor(name, torch.zeros(2, 3).numpy())

    weights = dict(make_model(config).state_dict())
    written = write_hybrid(tmp_path / "m.gguf", config, weights, change=change)
    model = open_gguf(tmp_path / "m.gguf")
    check_tensors(model, written)
    write_hybrid(tmp_path / "usual.gguf", config, weights)
    assert model.config == open_gguf(tmp_path / "usual.gguf").config


def test_lfm2_as_ollama_makes_it(tmp_path: Path) -> None:
    """The last norm has another name, and the header a width that the tensors do not have."""
    config = CASES["lfm2"]()

    def change(writer: Any) -> None:
        tensors = writer.tensors[-1]
        names = {"token_embd_norm.weight": "output_norm.weight"}
        writer.tensors[-1] = {names.get(name, name): info for name, info in tensors.items()}
        put_value(writer, "feed_forward_length", 144)

    written = write_hybrid(tmp_path / "m.gguf", config, dict(make_model(config).state_dict()), change=change)
    model = open_gguf(tmp_path / "m.gguf")
    check_tensors(model, written)
    assert model.config["intermediate_size"] == config.intermediate_size


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("qwen3.5", "ssm.time_step_rank", 0, "states of 0 heads"),
        ("qwen3.5", "ssm.group_count", 3, "16 heads in 256 numbers, and 3 groups"),
        ("qwen3.5", "ssm.inner_size", 2**31, "heads in 2147483648 numbers"),
        ("qwen3.5", "ssm.state_size", 2**31, "groups of 2147483648"),
        ("qwen3.5", "ssm.state_size", 24, "wrong shape for the tensor"),
        ("qwen3.5", "block_count", 2**31, "layers"),
        ("qwen3.5", "nextn_predict_layers", 2**31, "layers"),
        ("qwen3.5", "attention.recurrent_layers", [True], "must have a number for each layer"),
        ("lfm2", "attention.head_count_kv", 2, "must say which layers attend"),
        ("lfm2", "attention.head_count_kv", [2], "must have a number for each layer"),
    ],
)
def test_headers_that_lie(name: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    """By name, and before memory is taken for what they say."""
    config = CASES[name]()
    weights = dict(make_model(config).state_dict())
    write_hybrid(tmp_path / "m.gguf", config, weights, change=lambda writer: put_value(writer, key, value))
    with pytest.raises(ModelNotFound, match=message):
        open_gguf(tmp_path / "m.gguf")
