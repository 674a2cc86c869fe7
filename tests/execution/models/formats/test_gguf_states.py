"""Models with states in GGUF files: configuration, tensors and logits are those of transformers with the numbers that
the file stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.data import cases_of
from support.gguf_files import checkpoint_of, model_of, write_gguf
from support.gguf_models import make_model
from support.long import by_turns
from support.tiny_configs import maker_of

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound
from asyncengine.execution.models.formats.gguf.model import GgufModel
from asyncengine.execution.models.formats.gguf.tensors import BlockMatrix
from asyncengine.execution.models.loading import load_model

from .gguf_reading import check_decoder, check_tensors, comes_back, median_error

IDS = list(range(3, 24))
CASES: dict[str, Any] = {name: maker_of(fields) for name, fields in cases_of(__file__).items()}


def kinds_of(kind: str) -> Any:
    return lambda _, tensor: kind if tensor.shape[-1] % 32 == 0 else "F32"


@pytest.mark.parametrize(("name", "kind"), by_turns([*CASES, "qwen3next of old"], ("Q8_0", "F32")))
def test_comes_back(name: str, kind: str, tmp_path: Path) -> None:
    config = CASES[name.removesuffix(" of old")]()
    weights = checkpoint_of(make_model(config), tmp_path / "there")
    path = tmp_path / "m.gguf"
    written = write_gguf(path, config, weights, kinds_of(kind), legacy=name.endswith(" of old"))
    model = GgufModel(path)
    if config.model_type not in ("qwen3_next", "falcon_h1"):  # one of another layout, one with factors in tensors
        comes_back(model, config)
        if config.model_type != "kimi_linear":  # transformers saves its dense layer under a mixture's name
            check_tensors(model, written)
    assert written.keys() == weights.keys() - ({"lm_head.weight"} if config.tie_word_embeddings else set())
    reference = model_of(tmp_path / "there", written)
    check_decoder(model, reference, IDS)
    # rounding x costs such weights that much
    assert median_error(path, reference, IDS) < (2e-5 if kind == "F32" else 0.1)
    if kind == "Q8_0" and name == "qwen3.5":  # columns of quantized matrices, in another order as they are
        matrix = model.read("model.layers.0.linear_attn.out_proj.weight")
        assert isinstance(matrix, BlockMatrix)
        assert matrix.order is not None


def write(name: str, folder: Path, change: Any = lambda writer: None, *, legacy: bool = False) -> Any:
    """The model of that case in a file m.gguf: its configuration, and what was written."""
    config = CASES[name]()
    weights = checkpoint_of(make_model(config), folder / "there")
    return config, write_gguf(folder / "m.gguf", config, weights, change=change, legacy=legacy)


def put_value(writer: Any, key: str, value: Any) -> None:
    """Put a value in the place of what the header has under that key."""
    values, name = writer.kv_data[0], f"{writer.arch}.{key}"
    values.pop(name, None)
    (writer.add_array if isinstance(value, list) else writer.add_uint32)(name, value)


HEAD = {
    "nextn.eh_proj": "fc", "nextn.enorm": "pre_fc_norm_embedding", "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm", "attn_norm": "layers.0.input_layernorm",
    "post_attention_norm": "layers.0.post_attention_layernorm", "attn_q_norm": "layers.0.self_attn.q_norm",
    "attn_k_norm": "layers.0.self_attn.k_norm", "attn_output": "layers.0.self_attn.o_proj",
    **{f"attn_{part}": f"layers.0.self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")},
}  # fmt: skip


@pytest.mark.parametrize("whole", [True, False])
def test_the_layer_that_predicts_further_tokens(whole: bool, tmp_path: Path) -> None:
    """It is read as the checkpoint's head; where a part is missing, the model runs without, and says so."""
    config = CASES["qwen3.5"]()
    layers, width = config.num_hidden_layers, config.hidden_size
    generator, given = torch.Generator().manual_seed(3), dict[str, torch.Tensor]()

    def change(writer: Any) -> None:
        put_value(writer, "block_count", layers + 1)
        put_value(writer, "nextn_predict_layers", 1)
        attention = config.layer_types.index("full_attention")  # the head has a layer like it
        for stem, name in HEAD.items():
            like = f"model.layers.{attention}.{name.removeprefix('layers.0.')}.weight"
            shape = written_shapes.get(like, (width, 2 * width) if name == "fc" else (width,))
            given[f"mtp.{name}.weight"] = torch.randint(-8, 8, shape, generator=generator) / 8
            if whole or "hnorm" not in stem:
                added = 1.0 if "norm" in stem else 0.0
                writer.add_tensor(f"blk.{layers}.{stem}.weight", (given[f"mtp.{name}.weight"] + added).numpy())
        writer.add_tensor(f"blk.{layers}.nextn.shared_head_head.weight", torch.zeros(2, 3).numpy())

    written_shapes = {name: tuple(tensor.shape) for name, tensor in write("qwen3.5", tmp_path / "plain")[1].items()}
    _, written = write("qwen3.5", tmp_path, change)
    model = GgufModel(tmp_path / "m.gguf")
    assert model.config["num_hidden_layers"] == layers
    assert model.config["layer_types"] == config.layer_types
    check_tensors(model, written | {name: given[name] for name in given if name in model.tensors})
    assert len(model.tensors) == len(written) + len(HEAD) - (not whole)
    loaded = load_model(str(tmp_path / "m.gguf"), EngineConfig(dtype="float32", show_progress=False))
    reason = "the checkpoint's is of another form: it lacks mtp.pre_fc_norm_hidden.weight"
    assert loaded.no_mtp == (None if whole else reason)


def test_qwen35_as_ollama_makes_it(tmp_path: Path) -> None:
    """Layers without attention have no heads of keys; other parts lie in the same file."""
    config = CASES["qwen3.5"]()

    def change(writer: Any) -> None:
        writer.kv_data[0].pop("qwen35.attention.recurrent_layers")
        heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
        put_value(writer, "attention.head_count_kv", heads)
        for name in ("v.blk.0.attn_q.weight", "mtp.layers.0.attn_q.weight"):
            writer.add_tensor(name, torch.zeros(2, 3).numpy())

    _, written = write("qwen3.5", tmp_path, change)
    model = GgufModel(tmp_path / "m.gguf")
    check_tensors(model, written)
    write("qwen3.5", tmp_path / "usual")
    assert model.config == GgufModel(tmp_path / "usual" / "m.gguf").config


def test_lfm2_as_ollama_makes_it(tmp_path: Path) -> None:
    """The last norm has another name, and the header a width that the tensors do not have."""
    config = CASES["lfm2"]()

    def change(writer: Any) -> None:
        tensors = writer.tensors[-1]
        names = {"token_embd_norm.weight": "output_norm.weight"}
        writer.tensors[-1] = {names.get(name, name): info for name, info in tensors.items()}
        put_value(writer, "feed_forward_length", 144)

    _, written = write("lfm2", tmp_path, change)
    model = GgufModel(tmp_path / "m.gguf")
    check_tensors(model, written)
    assert model.config["intermediate_size"] == config.intermediate_size


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("qwen3.5", "ssm.time_step_rank", 0, "states of 0 heads"),
        ("qwen3.5", "ssm.group_count", 3, "16 heads in 256 numbers, and 3 groups"),
        ("qwen3.5", "ssm.inner_size", 2**31, "heads in 2147483648 numbers"),
        ("qwen3.5", "attention.recurrent_layers", [True], "must have a number for each layer"),
        ("lfm2", "attention.head_count_kv", 2, "must say which layers attend"),
        ("mamba2", "embedding_length", 48, "must be a multiple of .embedding_length"),
        ("kimi-linear", "kda.head_dim", 2**31, "states of 2147483648 numbers"),
    ],
)
def test_headers_that_lie(name: str, key: str, value: Any, message: str, tmp_path: Path) -> None:
    """Wrong values are refused by name, and before memory is taken for what they say."""
    write(name, tmp_path, lambda writer: put_value(writer, key, value))
    with pytest.raises(ModelNotFound, match=message):
        GgufModel(tmp_path / "m.gguf")
