"""Tiny models of every family, written by the public GGUF writer: the configuration comes back, and every tensor under
its own name, with the numbers that were written."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.data import cases_of
from support.gguf_files import PLAIN, QUANTIZED, checkpoint_of, model_of, write_gguf
from support.gguf_models import IDS, make_model, pattern
from support.tiny_configs import changed, maker_of
from support.tiny_models import FAMILIES

from asyncengine.errors import ModelNotFound
from asyncengine.execution.layers.stored import dense
from asyncengine.execution.models.formats.gguf.model import GgufModel
from asyncengine.execution.models.formats.gguf.tensors import BlockMatrix

from .gguf_reading import check_decoder, check_stacked, check_tensors, comes_back, median_error, values

CASES: dict[str, Callable[[], Any]] = {name: maker_of(fields) for name, fields in cases_of(__file__).items()}
DIFFERENT = {"mistral": "llama"}
"""Model types that come back where llama.cpp's files do not tell a family from Llama."""


@pytest.mark.parametrize("name", CASES)
def test_comes_back(name: str, tmp_path: Path) -> None:
    """Configuration, tensors and logits: those of transformers with what the file's numbers stand for."""
    config = CASES[name]()
    reference = make_model(config)
    written = write_gguf(
        tmp_path / "m.gguf", config, dict(reference.state_dict()),
        lambda _, tensor: "Q8_0" if tensor.shape[-1] % 32 == 0 else "F16",
    )  # fmt: skip
    model = GgufModel(tmp_path / "m.gguf")
    check_tensors(model, written)
    assert model.config["model_type"] == DIFFERENT.get(name, config.model_type)
    back = comes_back(model, config)
    assert (back.eos_token_id, back.bos_token_id) == (config.eos_token_id, config.bos_token_id)
    reference.load_state_dict(written, strict=False)
    check_decoder(model, reference, IDS)


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        ("qwen2moe", "mlp.experts.3.gate_proj"), ("qwen3moe", "mlp.experts.3.gate_proj"),
        ("mixtral", "block_sparse_moe.experts.3.w1"),
    ],
)  # fmt: skip
def test_experts(name: str, gate: str, tmp_path: Path) -> None:
    """Each expert's matrices under names of their own, the configuration, and the logits of what was written."""
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    sizes |= {"mlp_only_layers": []} if name == "qwen2moe" else {}  # a file says nothing of such layers
    config = changed(name, layer_types=None, **sizes)()
    weights = checkpoint_of(make_model(config), tmp_path / "there")
    kinds = {"ffn_gate_exps": "MXFP4", "ffn_up_exps": "MXFP4", "ffn_down_exps": "Q8_0"}
    written = write_gguf(
        tmp_path / "m.gguf", config, weights,
        lambda tensor, _: next((kind for part, kind in kinds.items() if part in tensor), "F32"),
    )  # fmt: skip
    model = GgufModel(tmp_path / "m.gguf")
    check_tensors(model, written)
    check_decoder(model, model_of(tmp_path / "there", written), IDS)
    first = model.read(f"model.layers.1.{gate}.weight")
    assert isinstance(first, BlockMatrix)
    assert first.name == "MXFP4"
    comes_back(model, config)


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0", "F32"])
def test_gpt_oss(kind: str, tmp_path: Path) -> None:
    """Gate and up, apart in the file, take turns again; all experts are one tensor; sinks and biases come along."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "layer_types": pattern(2, 2)}
    config = changed("gpt-oss", swiglu_limit=7.0, swiglu_alpha=1.702, **sizes)()  # a file has neither
    reference = make_model(config)
    written = write_gguf(
        tmp_path / "m.gguf", config, dict(reference.state_dict()),
        lambda name, _: kind if "_exps" in name else "F32",
    )  # fmt: skip
    reference.load_state_dict(written)
    model = GgufModel(tmp_path / "m.gguf")
    check_stacked(model, written, kind)
    assert median_error(tmp_path / "m.gguf", reference, IDS) < 2e-5
    comes_back(model, config)


@pytest.mark.parametrize("kind", [*QUANTIZED, *PLAIN])
def test_every_type_in_a_model(kind: str, tmp_path: Path) -> None:
    """Queries and keys of Llama lie in another order of rows; every type comes back in the right one."""
    config = changed("llama", hidden_size=256, head_dim=64, intermediate_size=256, num_hidden_layers=1)()
    written = write_gguf(tmp_path / "m.gguf", config, dict(make_model(config).state_dict()), lambda *_: kind)
    model = GgufModel(tmp_path / "m.gguf")
    check_tensors(model, written)
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = model.read(name)
    if kind not in PLAIN:
        assert isinstance(stored, BlockMatrix)
        assert torch.equal(dense(stored, 40, 77), written[name][40:77])
        assert model.config["dtype"] == "bfloat16"
    assert model.tensors[name].dtype == kind
    model.release(stored)
    model.release(model.read("model.norm.weight"))
    assert torch.equal(values(model, name), written[name].float())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no /proc")
def test_the_mapping_lives_as_long_as_a_tensor(tmp_path: Path) -> None:
    """No mapping lives longer: an engine that is closed leaves nothing of the file behind."""
    config = FAMILIES["llama"]()
    path = tmp_path / "m.gguf"
    write_gguf(path, config, dict(make_model(config).state_dict()))

    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    model = GgufModel(path)
    tensor = model.read("model.norm.weight")
    assert isinstance(tensor, torch.Tensor)
    expected = tensor.clone()
    model.release(tensor)
    del model
    gc.collect()
    assert mapped()
    assert torch.equal(tensor, expected)
    del tensor
    gc.collect()
    assert not mapped()


def test_gemma_3_as_ollama_makes_it(tmp_path: Path) -> None:
    """The file has its image part in it, and lacks what every Gemma 3 has alike."""
    config = CASES["gemma3"]()
    written = write_gguf(
        tmp_path / "m.gguf", config, dict(make_model(config).state_dict()),
        more={"tokenizer.ggml.eos_token_ids": [2, 9]},
        without=("gemma3.rope.freq_base", "gemma3.rope.freq_base_swa", "gemma3.attention.layer_norm_rms_epsilon"),
        beside=("v.blk.0.attn_q.weight", "v.patch_embedding.weight", "mm.mm_input_projection.weight"),
    )  # fmt: skip
    model = GgufModel(tmp_path / "m.gguf")
    check_tensors(model, written)
    rope = model.config["rope_parameters"]
    assert rope["full_attention"] == {"rope_type": "default", "rope_theta": 1e6}
    assert rope["sliding_attention"] == {"rope_type": "default", "rope_theta": 1e4}
    assert model.config["rms_norm_eps"] == 1e-6
    assert model.config["eos_token_id"] == [2, 9]


@pytest.mark.parametrize(("layers", "scaled", "cap"), [(26, False, None), (34, True, 30.0), (62, True, 30.0)])
def test_gemma_3_by_its_layers(layers: int, scaled: bool, cap: float | None, tmp_path: Path) -> None:
    """4B to 27B stretch positions by 8, 1B has no cap, 27B scales scores by its width: where files say it wrongly."""
    config = changed(
        "gemma3", num_hidden_layers=layers, layer_types=pattern(6, layers), final_logit_softcapping=30.0, hidden_size=32
    )()
    write_gguf(tmp_path / "m.gguf", config, {"model.embed_tokens.weight": torch.zeros(160, 32)}, beside=[
        f"v.{index}" for index in range(layers)
    ])  # fmt: skip
    found = GgufModel(tmp_path / "m.gguf").config
    assert (found["rope_parameters"]["full_attention"].get("factor") == 8.0) == scaled
    assert found["final_logit_softcapping"] == cap
    assert found["query_pre_attn_scalar"] == (8 if layers == 62 else 16)


@pytest.mark.parametrize(("name", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl")])
def test_the_text_part_of_models_with_images(name: str, architecture: str, tmp_path: Path) -> None:
    """The text part is that of the sibling without images."""
    config = FAMILIES[name]()
    tensors = dict(make_model(config).state_dict())
    written = write_gguf(
        tmp_path / "m.gguf", config, tensors, beside=["v.blk.0.attn_q.weight"], architecture=architecture
    )
    model = GgufModel(tmp_path / "m.gguf")
    check_tensors(model, written)
    write_gguf(tmp_path / "text.gguf", config, tensors)
    assert model.config == GgufModel(tmp_path / "text.gguf").config


def test_mistral_small_as_ollama_makes_it(tmp_path: Path) -> None:
    """It has Ministral 3's name, and is Llama."""
    config = FAMILIES["llama"]()
    config.model_type = "ministral3"
    config.rope_parameters |= {"mscale_all_dim": 0.0, "llama_4_scaling_beta": 0.0}
    model = make_model(FAMILIES["llama"]())
    keys = ("mistral3.attention.temperature_scale", "mistral3.rope.scaling.yarn_log_multiplier")
    written = write_gguf(tmp_path / "m.gguf", config, dict(model.state_dict()), without=keys)
    opened = GgufModel(tmp_path / "m.gguf")
    check_tensors(opened, written)
    assert opened.config["model_type"] == "llama"


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A model in several files."""
    folder = tmp_path_factory.mktemp("split")
    config = FAMILIES["llama"]()
    return folder, write_gguf(folder / "m.gguf", config, dict(make_model(config).state_dict()), split=10)


def test_split_files(parts: tuple[Path, dict[str, torch.Tensor]]) -> None:
    """Any of its files stands for all."""
    folder, written = parts
    files = sorted(folder.glob("*.gguf"))
    assert len(files) > 2
    for file in (files[0], files[-1]):
        model = GgufModel(file)
        assert model.files == tuple(files)
        check_tensors(model, written)


def test_split_files_that_do_not_fit(parts: tuple[Path, dict[str, torch.Tensor]], tmp_path: Path) -> None:
    files = sorted(parts[0].glob("*.gguf"))
    names = [file.name for file in files]

    def copy(**changes: str) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for file in files:
            (folder / changes.get(file.name, file.name)).symlink_to(file)
        return folder

    folder = copy()
    (folder / names[1]).unlink()
    with pytest.raises(ModelNotFound, match=f"one of {len(files)} files; missing is {names[1]}"):
        GgufModel(folder / names[0])
    with pytest.raises(ModelNotFound, match="says that it is part"):
        GgufModel(copy(**{names[1]: names[2], names[2]: names[1]}) / names[0])
    with pytest.raises(ModelNotFound, match="under another name"):
        GgufModel(copy(**{names[0]: "renamed.gguf"}) / "renamed.gguf")
    folder = copy()
    (folder / names[1]).unlink()
    (folder / names[1]).symlink_to(tmp_path / "nothing")
    with pytest.raises(ModelNotFound, match="missing is"):
        GgufModel(folder / names[0])
    (folder / "m-00002-of-00001.gguf").symlink_to(files[0])
    with pytest.raises(ModelNotFound, match=r"another name|no part of"):
        GgufModel(folder / "m-00002-of-00001.gguf")
