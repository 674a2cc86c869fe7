"""Tiny random checkpoints of models that read images or sounds as well, each with a tower of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from support.tiny_models import FAMILIES, VOCAB, WHOLE, common, randomize

IMAGE, VIDEO = VOCAB - 1, VOCAB - 2
"""Tokens that stand for others; no prompt of a test has them."""
_TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_SMALL = _TOWER | {"image_size": 16, "patch_size": 4}
_BLOCKS = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
_DEEP = _BLOCKS | {"out_hidden_size": WHOLE, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_SIGHT = _BLOCKS | {"out_hidden_size": WHOLE, "num_position_embeddings": 16}
_GLM = _BLOCKS | {"out_hidden_size": WHOLE, "image_size": 16}
_SOUND = {"num_mel_bins": 8, "max_source_positions": 16}


def _parts(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary embedding of positions of three parts."""
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **more}


def _of(kind: str) -> dict[str, Any]:
    return _SMALL | {"model_type": kind}


_INTERLEAVED = common(hidden_size=WHOLE, head_dim=16, rope_parameters=_parts(4, 2, 2, mrope_interleaved=True))
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_IN_PART = common(hidden_size=WHOLE, rope_parameters=_parts(1, 2, 1, partial_rotary_factor=0.5))
_GROUPS = {
    "head_dim": 16, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 2, "routed_scaling_factor": 1.5, "attention_bias": True,
}  # fmt: skip
_PIXTRAL = _SMALL | {"model_type": "pixtral", "head_dim": 16}

CONFIGS: Mapping[str, Callable[[], Any]] = {
    "gemma3": lambda: hf.Gemma3Config(
        text_config=FAMILIES["gemma3"](), vision_config=_SMALL, mm_tokens_per_image=1, image_token_index=IMAGE
    ),
    "gemma4": lambda: hf.Gemma4Config(
        text_config=_set(FAMILIES["gemma4"](), use_bidirectional_attention="vision"),
        vision_config=_TOWER | {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
        audio_token_id=IMAGE, **_TOKENS,
    ),
    "qwen2_vl": lambda: hf.Qwen2VLConfig(
        text_config=common(hidden_size=WHOLE, rope_parameters=_parts(2, 3, 3)),
        vision_config={"depth": 1, "embed_dim": 32, "hidden_size": WHOLE, "num_heads": 2, "patch_size": 4}, **_TOKENS,
    ),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config=common(hidden_size=WHOLE, intermediate_size=96, rope_parameters=_parts(2, 3, 3)),
        vision_config=_BLOCKS | {"out_hidden_size": WHOLE, "fullatt_block_indexes": [0]}, **_TOKENS,
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config=_INTERLEAVED, vision_config=_DEEP, tie_word_embeddings=True, **_TOKENS
    ),
    "qwen3_vl_moe": lambda: hf.Qwen3VLMoeConfig(text_config=_INTERLEAVED | _MIXTURE, vision_config=_DEEP, **_TOKENS),
    "qwen3_5": lambda: hf.Qwen3_5Config(text_config=FAMILIES["qwen3.5"]().to_dict(), vision_config=_SIGHT, **_TOKENS),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeConfig(
        text_config=FAMILIES["qwen3.5moe"]().to_dict(), vision_config=_SIGHT, **_TOKENS
    ),
    "glm4v": lambda: hf.Glm4vConfig(text_config=_IN_PART, vision_config=_GLM, **_TOKENS),
    "glm46v": lambda: hf.Glm46VConfig(
        text_config=_IN_PART | {"model_type": "glm4v_text"}, vision_config=_GLM | {"model_type": "glm4v_vision"},
        **_TOKENS,
    ),
    "glm4v_moe": lambda: hf.Glm4vMoeConfig(text_config=_IN_PART | _GROUPS, vision_config=_GLM, **_TOKENS),
    "mistral3": lambda: hf.Mistral3Config(
        text_config=FAMILIES["mistral"](), vision_config=_PIXTRAL, image_token_index=IMAGE, tie_word_embeddings=False
    ),
    "mistral3-ministral": lambda: hf.Mistral3Config(
        text_config=FAMILIES["ministral3"](), vision_config=_PIXTRAL, image_token_index=IMAGE
    ),
    "aya_vision": lambda: hf.AyaVisionConfig(
        text_config=FAMILIES["cohere2"](), vision_config=_of("siglip_vision_model"), image_token_index=IMAGE
    ),
    "cohere2_vision": lambda: hf.Cohere2VisionConfig(
        text_config=FAMILIES["cohere2"](), vision_config=_of("siglip_vision_model"), image_token_id=IMAGE,
        alignment_intermediate_size=32,
    ),
    "exaone4_5": lambda: hf.Exaone4_5_Config(
        text_config=FAMILIES["exaone4"](), vision_config=_BLOCKS | {"out_hidden_size": 48}, **_TOKENS
    ),
    "internvl": lambda: hf.InternVLConfig(
        text_config=FAMILIES["qwen3"](), vision_config=_TOWER | {"image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=IMAGE,
    ),
    "lfm2_vl": lambda: hf.Lfm2VlConfig(
        text_config=FAMILIES["lfm2"](),
        vision_config=_TOWER | {"model_type": "siglip2_vision_model", "num_patches": 16, "patch_size": 4},
        image_token_id=IMAGE, projector_hidden_size=32,
    ),
    "llama4": lambda: hf.Llama4Config(
        text_config=FAMILIES["llama4"](),
        vision_config=_SMALL | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        image_token_index=IMAGE,
    ),
    "llava": lambda: hf.LlavaConfig(
        text_config=FAMILIES["llama"](), vision_config=_of("clip_vision_model"), image_token_index=IMAGE
    ),
    "llava_next": lambda: hf.LlavaNextConfig(
        text_config=FAMILIES["granite"](), vision_config=_of("clip_vision_model"), image_token_index=IMAGE
    ),
    "llava_onevision": lambda: hf.LlavaOnevisionConfig(
        text_config=FAMILIES["qwen2"](), vision_config=_of("siglip_vision_model"), image_token_index=IMAGE
    ),
    "idefics3": lambda: hf.Idefics3Config(
        text_config=FAMILIES["llama"](), vision_config=_SMALL, image_token_id=IMAGE
    ),
    "smolvlm": lambda: hf.SmolVLMConfig(text_config=FAMILIES["llama"](), vision_config=_SMALL, image_token_id=IMAGE),
    "qwen2_audio": lambda: hf.Qwen2AudioConfig(
        text_config=FAMILIES["qwen2"](),
        audio_config=_SOUND | {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32},
        audio_token_index=IMAGE,
    ),
    "voxtral": lambda: hf.VoxtralConfig(
        text_config=FAMILIES["llama"](), audio_config=_TOWER | _SOUND, audio_token_id=IMAGE
    ),
}  # fmt: skip


def make_multimodal(name: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of all its parts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForMultimodalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    randomize(model, name, torch.Generator().manual_seed(seed))
    return model.to(dtype)


def save_multimodal(name: str, folder: Path, **fields: Any) -> Any:
    """Write such a checkpoint as transformers does, and return the model."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    model = make_multimodal(name)
    model.save_pretrained(folder, **fields)
    if bars:
        logging.enable_progress_bar()
    return model


def _set(config: Any, **changes: Any) -> Any:
    for key, value in changes.items():
        setattr(config, key, value)
    return config
