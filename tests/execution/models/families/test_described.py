"""Details of families beside their numbers (`tests/execution/runner/test_families.py`): names, adapters, kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from support.checkpoints import Checkpoint
from support.drive import Driver, greedy_reference, prompts
from support.forwards import logits_of, relative_error
from support.tiny_configs import changed, tiny
from support.tiny_models import FAMILIES, OPTIONS, VOCAB, make_model
from torch import nn

from asyncengine.config import EngineConfig
from asyncengine.execution.layers.kernels import LayerKernels
from asyncengine.execution.layers.options import LayerOptions
from asyncengine.execution.models.decoder import Decoder
from asyncengine.execution.models.families import decoder_config_of
from asyncengine.execution.models.loading import LoadedModel, load_model
from asyncengine.execution.runner.building import build_runner

CONFIG = EngineConfig(page_size=4, max_num_seqs=80, kv_cache_memory="8MiB", show_progress=False, num_threads=1)
TEXT = prompts([40], VOCAB)[0]


def load(folder: Path, **fields: Any) -> LoadedModel:
    loaded = load_model(str(folder), CONFIG.replace(**fields))
    assert isinstance(loaded.model, Decoder), "through transformers"
    return loaded


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (changed("olmoe", clip_qkv=1.0), "clip_qkv"),
        (changed("llama", hidden_act="quick_gelu"), "quick_gelu"),
        (tiny("ApertusConfig", hidden_act="tanh", rope_parameters={"rope_type": "default", "rope_theta": 1e4}), "tanh"),
    ],
    ids=["olmoe", "llama", "apertus"],
)
def test_options_that_are_not_written_down_run_through_transformers(
    make: Any, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, and nothing is computed as if the options were not there."""
    monkeypatch.setitem(FAMILIES, "other", make)
    model = make_model("other")
    model.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), CONFIG)
    assert not isinstance(loaded.model, Decoder)
    lines = [record.message for record in caplog.records if "through transformers" in record.message]
    assert [what in line for line in lines] == [True]
    runner = build_runner(loaded, CONFIG).runner
    driver = Driver(runner)
    assert driver.run([driver.job(TEXT[:30], 8)]) == [greedy_reference(model, TEXT[:30], 8)]
    runner.close()


def test_code_from_a_folder_is_not_taken_for_transformers_own() -> None:
    """Its configuration may call itself "phi3" and mean something else."""
    own = FAMILIES["phi3"]()
    assert decoder_config_of(own, 64) is not None
    for name in ("Phi3Config", "Llama2"):
        other = type(name, (type(own),), {"__module__": "folder.configuration_phi3"})
        assert decoder_config_of(other(), 64) is None


@pytest.mark.parametrize(("name", "prefix"), [("gpt2", "transformer."), ("opt", "model."), ("gemma2", "model.")])
def test_names_without_what_all_begin_with(name: str, prefix: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Checkpoints once had such names, and GPT-2's had masks beside the weights."""
    folder = checkpoint(name)
    stored = load_file(folder / "model.safetensors")
    tensors = {key.removeprefix(prefix): tensor for key, tensor in stored.items()}
    if name == "gpt2":
        tensors |= {"h.0.attn.bias": torch.ones(1, 1, 512, 512, dtype=torch.uint8)}
        tensors |= {"h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    assert torch.equal(*(logits_of(load(each).model, TEXT) for each in (folder, tmp_path)))


VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def with_images(name: str) -> Any:
    """A configuration of Gemma 3 or 4 that reads images as well."""
    if name == "gemma3":
        vision = VISION | {"image_size": 28, "patch_size": 14}
        return hf.Gemma3Config(
            text_config=FAMILIES[name](), vision_config=vision, mm_tokens_per_image=1, image_token_id=5
        )
    text = FAMILIES[name]()
    text.use_bidirectional_attention = "vision"
    vision = VISION | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64}
    tokens = dict.fromkeys(("image_token_id", "audio_token_id", "video_token_id"), VOCAB - 1)
    return hf.Gemma4Config(text_config=text, vision_config=vision, **tokens)


@pytest.mark.parametrize("name", [
    "gemma", "gemma2", "gemma3", "gemma4", "cohere", "cohere2", "apertus", "gpt2", "opt", "opt-350m",
    "gemma4-keys-are-values", "cohere-head-norms", "opt-bare", "images of gemma3", "images of gemma4",
])  # fmt: skip
def test_places_are_the_paths_of_modules(name: str) -> None:
    """The families of `tests/lora` are compared with peft there; the others have at least the same paths."""
    images = name.startswith("images of ")
    config = with_images(name.removeprefix("images of ")) if images else (FAMILIES | OPTIONS)[name]()
    described = decoder_config_of(config, 64)
    assert described is not None
    decoder = Decoder(described, LayerOptions(torch.float32, torch.device("meta"), LayerKernels()), 1)
    with torch.device("meta"):
        model = hf.AutoModelForCausalLM.from_config(config)
    kinds, apart = (nn.Linear, hf.pytorch_utils.Conv1D), ("model.vision", "model.multi", "model.embed_vision")
    table = model.get_input_embeddings()
    paths = {path for path, part in model.named_modules() if isinstance(part, kinds) or part is table}
    paths = {path for path in paths if not path.startswith(apart)}
    assert {path for target in decoder.lora_targets() for path, _ in target.modules} == paths
    keys = {key for key in model.state_dict() if not key.startswith(apart)}
    assert {*decoder.slots(), "lm_head.weight"} == {*keys, "lm_head.weight"}


def test_kimi_linear_as_its_makers_save_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Layer types in `linear_attn_config`, counted from one, and the dense layer's own name for its matrices; and as
    transformers holds it."""
    saved = checkpoint("kimi-linear", heavy=True)
    tensors = load_file(saved / "model.safetensors")
    config = json.loads((saved / "config.json").read_text())
    for name in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        del config[name]
    config |= {
        "first_k_dense_replace": 1,
        "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "head_dim": 16, "num_heads": 3,
                               "short_conv_kernel_size": 4},
    }  # fmt: skip
    spellings = {
        "makers": lambda name: name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."),
        "held": lambda name: name if ".experts." in name else name.replace(".block_sparse_moe.", ".mlp."),
    }
    expected = logits_of(load(saved).model, TEXT)
    for spelling, rename in spellings.items():
        folder = tmp_path / spelling
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        named = {rename(name): tensor for name, tensor in tensors.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
        assert relative_error(expected, logits_of(load(folder).model, TEXT)) < 1e-6
