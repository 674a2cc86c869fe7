"""Checkpoints that cannot be loaded say why, in one line, with the right type of error."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors import safe_open
from safetensors.torch import save_file
from support.checkpoints import Checkpoint, edited

from asyncengine.config import EngineConfig
from asyncengine.errors import ModelNotFound, OutOfMemory, UnsupportedModel
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.fallback.model import TransformersModel
from asyncengine.execution.models.loading import load_model

CONFIG = EngineConfig()
UP = "model.layers.1.mlp.up_proj.weight"


def copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


def save(config: Any, folder: Path, kind: Any = hf.AutoModelForCausalLM) -> str:
    kind.from_config(config).save_pretrained(folder)
    return str(folder)


def rewrite(folder: Path, change: Any) -> None:
    file = folder / "model.safetensors"
    with safe_open(str(file), "pt") as stream:
        tensors = {key: stream.get_tensor(key).clone() for key in stream.keys()}  # noqa: SIM118 - not a dict
    change(tensors)
    save_file(tensors, str(file), {"format": "pt"})


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "~/nothing-here", "a/b/c", ""])
def test_no_such_folder(path: str) -> None:
    with pytest.raises(ModelNotFound, match="no folder"):
        load_model(path, CONFIG)


def test_no_weights(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copy(checkpoint("llama"), tmp_path / "a")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"has no model\.safetensors"):
        load_model(str(folder), CONFIG)


def test_pickles_are_never_read(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy(checkpoint("llama"), tmp_path / "a")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    with pytest.raises(ModelNotFound, match="safetensors alone"):
        load_model(str(folder), CONFIG)


@pytest.mark.parametrize("fuse", [True, False])
@pytest.mark.parametrize(
    ("change", "says"),
    [(lambda tensors: tensors.pop(UP), f"lacks the tensor {UP}"),
     (lambda tensors: tensors.update({UP: torch.ones(7)}), f"has a wrong shape for the tensor {UP}")],
    ids=["a missing one", "one of another shape"],
)  # fmt: skip
def test_a_tensor_is_named(change: Any, says: str, fuse: bool, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = copy(checkpoint("llama"), tmp_path / "a")
    rewrite(folder, change)
    with pytest.raises(ModelNotFound, match=re.escape(says)):
        load_model(str(folder), CONFIG.replace(fuse=fuse))


def test_too_large_for_memory(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncengine.execution.models.memory.needs.free_bytes", lambda device: 1000)
    for fuse in (True, False):
        with pytest.raises(OutOfMemory, match=r"weights take .* GiB as float32"):
            load_model(str(checkpoint("llama")), CONFIG.replace(fuse=fuse))


def small(kind: Any, **fields: Any) -> Any:
    return kind(**{"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **fields})


UNSUPPORTED: dict[str, tuple[Any, str]] = {
    "falcon": (lambda: small(hf.FalconConfig, alibi=True), "'falcon' with alibi=True"),
    "xlnet": (lambda: small(hf.XLNetConfig, d_model=32, n_head=4, d_inner=32), "'xlnet' does not route its attention"),
    "mamba": (lambda: small(hf.MambaConfig, state_size=4), "'mamba' (keeps recurrent state|has layers of type)"),
    "jamba": (
        lambda: small(hf.JambaConfig, intermediate_size=32, mamba_d_state=4, num_key_value_heads=2),
        "'jamba' (keeps recurrent state|has layers of type)",
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_families_out_of_reach(name: str, tmp_path: Path) -> None:
    factory, message = UNSUPPORTED[name]
    with pytest.raises(UnsupportedModel, match=message):
        load_model(save(factory(), tmp_path / "m"), CONFIG)


def test_encoder_decoder_and_encoder(tmp_path: Path) -> None:
    t5 = hf.T5Config(vocab_size=60, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        load_model(save(t5, tmp_path / "t5", hf.AutoModelForSeq2SeqLM), CONFIG)
    vit = hf.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    with pytest.raises(UnsupportedModel, match="not a causal language model"):
        load_model(save(vit, tmp_path / "vit", hf.AutoModel), CONFIG)


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"hidden_act": "soft"}, "hidden_act is 'soft'; known are gelu, .*silu"),
     ({"rope_parameters": {"rope_type": "soft", "rope_theta": 1e4}}, "rope_type is 'soft'; known are default, .*yarn")],
)  # fmt: skip
def test_an_unknown_function(fields: Any, says: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = edited(checkpoint("llama"), tmp_path / "a", **fields)
    with pytest.raises(UnsupportedModel, match=rf"^config\.json: {says}"):
        load_model(str(folder), CONFIG)


def test_an_unknown_quantization(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = edited(checkpoint("llama"), tmp_path / "a", quantization_config={"quant_method": "hqq"})
    with pytest.raises(UnsupportedModel, match=r"quantized with hqq are not read; awq, .* and GGUF are"):
        load_model(str(folder), CONFIG)


def test_code_in_the_folder_is_not_run(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """A known family with auto_map is that family, ours or transformers' own class."""
    auto_map = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    folder = edited(checkpoint("llama"), tmp_path / "a", auto_map=auto_map)
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    assert isinstance(load_model(str(folder), CONFIG).model, Decoder)
    plain = load_model(str(folder), CONFIG.replace(fuse=False)).model
    assert isinstance(plain, TransformersModel)
    assert type(plain.module).__name__ == "LlamaForCausalLM"


CONFIGURATION = """
from transformers import PreTrainedConfig

class Own(PreTrainedConfig):
    model_type = "{family}"
"""


@pytest.mark.parametrize("family", ["qwen3.5", "kimi-linear", "lfm2", "nemotron-h"])
def test_a_hybrid_with_code_of_its_own(
    family: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such code keeps its states where nobody else sees them. What would run them is said, if the family is known."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    folder = copy(checkpoint(family), tmp_path / "a")
    content = json.loads((folder / "config.json").read_text())
    own = {**content, "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (folder / "own.py").write_text(CONFIGURATION.format(family=content["model_type"]))
    (folder / "config.json").write_text(json.dumps(own))
    assert isinstance(load_model(str(folder), CONFIG).model, Decoder)
    for setting in ({"trust_remote_code": True}, {"fuse": False}):
        with pytest.raises(UnsupportedModel) as caught:
            load_model(str(folder), CONFIG.replace(**setting))
        said = re.fullmatch(
            r"family '(.*)' (keeps recurrent state|has layers of type).*; without (.*)", str(caught.value)
        )
        assert said
        [(name, value)] = setting.items()
        assert (said[1], said[3]) == (content["model_type"], f"{name}={value} its layers are those written down here")
    (folder / "config.json").write_text(json.dumps({**own, "model_type": "brand_new"}))
    (folder / "own.py").write_text(CONFIGURATION.format(family="brand_new"))
    with pytest.raises(UnsupportedModel, match=r"'brand_new' has layers of type '.*', which keep no plain KV cache$"):
        load_model(str(folder), CONFIG.replace(trust_remote_code=True))
