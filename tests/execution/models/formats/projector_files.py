"""GGUF files of tiny models that read pictures: the language model, and its image part (mmproj), as llama.cpp's
converter writes them, in names of the public `gguf` package's own table."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file
from support import kquants
from support.gguf_files import finish, write_gguf
from support.gguf_metadata import byte_level_metadata
from support.picture_models import PROCESSORS, save_picture_model
from transformers import AutoTokenizer

LANGUAGES = {
    "gemma3": ("gemma3_text", ""), "smolvlm": ("llama", ""), "idefics3": ("llama", ""),
    "qwen2_vl": ("qwen2", "qwen2vl"), "qwen2_5_vl": ("qwen2", "qwen2vl"), "qwen3_vl": ("qwen3", "qwen3vl"),
    "qwen3_5": ("qwen3_5_text", ""), "internvl": ("qwen3", ""), "lfm2_vl": ("lfm2", ""), "mistral3": ("llama", ""),
}  # fmt: skip
"""Family -> (model_type of a text model that is written alike, llama.cpp's name where it is another than its)."""
_TOKENS = {
    "gemma3": {
        "<|image|>": "<image_soft_token>", "<|begin|>": "<start_of_image>", "<|end|>": "<end_of_image>",
    },
    "smolvlm": {"<|image|>": "<image>"}, "idefics3": {"<|image|>": "<image>"}, "lfm2_vl": {"<|image|>": "<image>"},
    "internvl": {"<|image|>": "<IMG_CONTEXT>"}, "mistral3": {"<|image|>": "[IMG]"},
}  # fmt: skip
_OF_QWEN = {"<|image|>": "<|image_pad|>", "<|video|>": "<|video_pad|>"}
_BEFORE = (
    "model.language_model.", "language_model.model.", "model.text_model.", "model.",
)  # fmt: skip
Change = Callable[[Any], object]


def write_pair(
    family: str, folder: Path, *, kind: str = "F32", without: tuple[str, ...] = (), swapped: bool = False,
    change: Change = lambda writer: None, edit: Change = lambda config: None, renamed: bool = True,
    sections: bool = True,
) -> Any:  # fmt: skip
    """Write a checkpoint in `folder`/hf, and the same as `folder`/model.gguf and `folder`/mmproj-model.gguf;
    transformers' model.

    `kind`: the type of the image part's matrices. `without`: values that it leaves out. `swapped`: its feed-forward
    layers have each other's names, as early converters wrote them. `change`: told of its writer before it writes.
    `edit`: told of the configuration before the model is made. `renamed`: its tokens have the names of the family's.
    `sections`: the language model's header says how its positions rotate.
    """
    model = save_picture_model(
        family, folder / "hf", edit=lambda config: (_as_converters_take_it(config), edit(config))
    )
    if family == "lfm2_vl":  # headers leave all else to the reader
        settings = {"image_processor_type": "Lfm2VlImageProcessor", "encoder_patch_size": 4}
        (folder / "hf" / "preprocessor_config.json").write_text(json.dumps(settings))
    weights = load_file(folder / "hf" / "model.safetensors")
    language = {name: each for name, each in weights.items() if not _of_tower(name)}
    _write_language(family, folder, model.config, language, renamed=renamed, sections=sections)
    tower = {name: each for name, each in weights.items() if _of_tower(name)}
    writer = gguf.GGUFWriter(folder / "mmproj-model.gguf", "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    _header(writer, family, model.config)
    for key in without:
        del writer.kv_data[0][key]
    for own, tensor in _tensors(family, model.config, tower).items():
        turned = own.replace("ffn_up", "ffn_").replace("ffn_down", "ffn_up").replace("ffn_.", "ffn_down.")
        name = turned if swapped else own
        plain = tensor.ndim != 2 or "norm" in name or tensor.shape[-1] % 32
        stored = kquants.quantize(tensor.contiguous().numpy(), "F32" if plain else kind)
        writer.add_tensor(name, stored, raw_dtype=gguf.GGMLQuantizationType["F32" if plain else kind])
    change(writer)
    finish(writer)
    return model


def _as_converters_take_it(config: Any) -> None:
    """Values that headers leave to the reader are those of the family's published models."""
    if config.model_type == "gemma3":
        config.text_config.query_pre_attn_scalar = config.text_config.head_dim
    if config.model_type == "qwen3_5":
        config.text_config.rope_parameters |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    if config.model_type == "mistral3":
        config.text_config.sliding_window, config.vision_config.image_size = None, 32
    if config.model_type == "qwen2_5_vl":  # every other layer sees the whole picture
        config.vision_config.depth, config.vision_config.fullatt_block_indexes = 4, [1, 3]


def _of_tower(name: str) -> bool:
    return any(part in name for part in ("vision", "visual", "projector", "connector"))


def _write_language(
    family: str, folder: Path, config: Any, weights: Mapping[str, torch.Tensor], *, renamed: bool, sections: bool
) -> None:
    kind, architecture = LANGUAGES[family]
    text = copy.deepcopy(config.get_text_config())
    text.model_type, text.tie_word_embeddings = kind, config.tie_word_embeddings
    named = {}
    for name, tensor in weights.items():
        before = next((before for before in _BEFORE if name.startswith(before)), None)
        named["lm_head.weight" if before is None else f"model.{name.removeprefix(before)}"] = tensor
    more = byte_level_metadata(AutoTokenizer.from_pretrained(folder / "hf"), "gpt-2")
    more.pop("general.architecture")
    tokens = _TOKENS.get(family, _OF_QWEN) if renamed else {}
    more["tokenizer.ggml.tokens"] = [tokens.get(token, token) for token in more["tokenizer.ggml.tokens"]]
    for old, new in tokens.items():
        more["tokenizer.chat_template"] = more["tokenizer.chat_template"].replace(old, new)
    if sections and (pairs := text.rope_parameters.get("mrope_section")) is not None:
        more[f"{architecture or 'qwen35'}.rope.dimension_sections"] = [*pairs, 0]
    if family == "gemma3":
        kinds = [kind == "sliding_attention" for kind in text.layer_types]
        more["gemma3.attention.sliding_window_pattern"] = kinds
    write_gguf(folder / "model.gguf", text, named, more=more, architecture=architecture)


def _header(writer: Any, family: str, config: Any) -> None:
    """Write what the converter says of a vision tower and its processor."""
    vision, processor = config.vision_config, PROCESSORS[family]
    get = lambda *names: next(getattr(vision, name) for name in names if hasattr(vision, name))  # noqa: E731
    writer.add_clip_has_vision_encoder(True)
    writer.add_vision_projection_dim(config.get_text_config().hidden_size)
    patch = vision.patch_size
    writer.add_vision_patch_size(patch if isinstance(patch, int) else patch[0])
    writer.add_vision_embedding_length(get("embed_dim", "hidden_size"))
    writer.add_vision_block_count(get("depth", "num_hidden_layers"))
    writer.add_vision_head_count(get("num_heads", "num_attention_heads"))
    writer.add_vision_image_mean(processor.get("image_mean", [0.48145466, 0.4578275, 0.40821073]))
    writer.add_vision_image_std(processor.get("image_std", [0.26862954, 0.26130258, 0.27577711]))
    writer.add_vision_attention_layernorm_eps(1e-6)
    if family.startswith("qwen"):
        kinds = {"qwen2_vl": "QWEN2VL", "qwen2_5_vl": "QWEN25VL"}
        writer.add_clip_projector_type(getattr(gguf.VisionProjectorType, kinds.get(family, "QWEN3VL")))
        writer.add_uint32("clip.vision.image_min_pixels", processor["min_pixels"])
        writer.add_uint32("clip.vision.image_max_pixels", processor["max_pixels"])
        if family == "qwen2_5_vl":
            writer.add_vision_n_wa_pattern(vision.fullatt_block_indexes[0] + 1)
            writer.add_uint32("clip.vision.window_size", vision.window_size)
        return
    if family in ("internvl", "lfm2_vl", "mistral3"):
        _header_of_tiles(writer, family, config)
        return
    writer.add_vision_image_size(vision.image_size)
    if family == "gemma3":
        writer.add_clip_projector_type(gguf.VisionProjectorType.GEMMA3)
        writer.add_vision_projector_scale_factor(vision.image_size // vision.patch_size // 2)
    else:
        writer.add_clip_projector_type(gguf.VisionProjectorType.IDEFICS3)
        writer.add_vision_projector_scale_factor(config.scale_factor)
        writer.add_vision_preproc_image_size(processor["size"]["longest_edge"])


def _header_of_tiles(writer: Any, family: str, config: Any) -> None:
    kinds = {"internvl": "INTERNVL", "lfm2_vl": "LFM2", "mistral3": "PIXTRAL"}
    writer.add_clip_projector_type(getattr(gguf.VisionProjectorType, kinds[family]))
    writer.add_vision_use_gelu(True)
    if family == "internvl":
        writer.add_vision_image_size(config.vision_config.image_size[0])
        writer.add_vision_projector_scale_factor(int(1 / config.downsample_ratio))
        writer.add_uint32("clip.vision.preproc_max_tiles", PROCESSORS[family]["max_patches"])
    elif family == "lfm2_vl":
        writer.add_vision_projector_scale_factor(config.downsample_factor)
    else:
        writer.add_vision_image_size(config.vision_config.image_size)
        writer.add_vision_spatial_merge_size(config.spatial_merge_size)


def _as_converted(family: str, name: str, tensor: torch.Tensor, config: Any) -> tuple[str, torch.Tensor]:
    """A tensor's name in the package's table, and its numbers, after what the converter does for the family alone."""
    if family == "internvl":
        places = {"layer_norm": 0, "linear_1": 1, "linear_2": 3}
        for own, place in places.items():
            name = name.replace(f"multi_modal_projector.{own}", f"mlp1.{place}")
        name = name.replace("vision_tower.vision_model.", "model.vision_tower.")
        name = f"{name}.weight" if name.endswith(("lambda_1", "lambda_2", "position_embeddings")) else name
    elif family == "lfm2_vl":
        name = name.removeprefix("model.")
    if family == "lfm2_vl" and tensor.shape[-1] == 3 * config.vision_config.patch_size**2:
        side = config.vision_config.patch_size
        tensor = tensor.view(-1, side, side, 3).permute(0, 3, 1, 2)
    elif family == "mistral3":
        name = name.replace("vision_model.", "")
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.vision_config.num_attention_heads
            tensor = tensor.view(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
    return name, tensor


def _tensors(family: str, config: Any, tower: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tower's tensors as the converter writes them."""
    layers = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    found: dict[str, torch.Tensor] = {}
    for stored, own in tower.items():
        if ".head." in stored:
            continue
        name = stored.removeprefix("model.") if "visual." in stored else stored
        name = name.replace("vision_tower.", "vision_tower.vision_model.").replace("_weight", ".weight")
        name, tensor = _as_converted(family, name, own, config)
        deep = family == "qwen3_vl" and "deepstack_merger_list." in name
        if name == "visual.patch_embed.proj.weight":
            found["v.patch_embd.weight"], found["v.patch_embd.weight.1"] = tensor.unbind(2)
        elif ".qkv." in name and family.startswith("qwen2"):
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                found[_name(layers, name.replace("qkv", part))] = rows
        elif deep:
            _, _, index, inner = name.split(".", 3)
            inner = inner.replace("linear_", "")
            found[f"v.deepstack.{config.vision_config.deepstack_visual_indexes[int(index)]}.{inner}"] = tensor
        elif name.startswith("visual.merger.linear_fc"):
            found[f"mm.{0 if 'fc1' in name else 2}.{name.rpartition('.')[2]}"] = tensor
        elif name.startswith("visual.merger.norm"):
            found[f"v.post_ln.{name.rpartition('.')[2]}"] = tensor
        else:
            found[_name(layers, name)] = tensor + 1 if "soft_emb_norm" in name else tensor
    return found


def _name(table: Any, name: str) -> str:
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return str(found)
