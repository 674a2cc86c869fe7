"""The model while it is trained: transformers' own Idefics3, small, and the folder that it is exported to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from asyncengine.demo import VISION_PATH
from makers.demo_embedder.export import write_json, write_weights
from makers.demo_vision.build_tokenizer import END, IMAGE, SPECIAL
from makers.demo_vision.scenes import SIDE

PAD, EOS, PICTURE = 0, SPECIAL.index(END), SPECIAL.index(IMAGE)
TOKENS = 9
"""Tokens of a picture: one for each third of it both ways."""
PLACED = f"{SPECIAL[-2]}{SPECIAL[-1]}{IMAGE * TOKENS}{SPECIAL[-2]}"
"""Text that stands for a picture, as Idefics3's processor has it."""
PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "do_image_splitting": False,
    "size": {"longest_edge": SIDE},
    "max_image_size": {"longest_edge": SIDE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def new_model(vocabulary: int, seed: int) -> Any:
    """A tower of three layers over 36 patches, of which squares of four become a token, and a Llama of three layers."""
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, LlamaConfig

    torch.manual_seed(seed)
    text = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=PAD,
    )
    vision = {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
        "image_size": SIDE, "patch_size": 8,
    }  # fmt: skip
    config = Idefics3Config(
        text_config=text, vision_config=vision, image_token_id=PICTURE, scale_factor=2, tie_word_embeddings=True,
        pad_token_id=PAD,
    )  # fmt: skip
    config._attn_implementation = "eager"  # the gradient of the other one takes half of a step in bfloat16
    return Idefics3ForConditionalGeneration(config)


def pixels(images: list[Image.Image]) -> Tensor:
    """Pictures as the image processor gives them, ``[pictures, 3, SIDE, SIDE]`` between -1 and 1."""
    resized = [np.asarray(image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)) for image in images]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).float().div_(127.5).sub_(1.0)


def features(model: Any, images: Tensor) -> Tensor:
    """Hidden states of pictures for the language model, ``[pictures, TOKENS, hidden]``."""
    found: Tensor = model.model.connector(model.model.vision_model(pixel_values=images).last_hidden_state)
    return found


def hidden_states(model: Any, ids: Tensor, seen: Tensor) -> Tensor:
    """Last hidden states ``[rows, longest, hidden]``, with `seen` in the places of pictures' tokens, in order. Rows are
    padded behind their ends, where no mask is needed."""
    embedded = model.model.text_model.embed_tokens(ids)
    places = (ids == PICTURE)[:, :, None].expand_as(embedded)
    embedded = embedded.masked_scatter(places, seen.to(embedded.dtype))
    found: Tensor = model.model.text_model(inputs_embeds=embedded, use_cache=False).last_hidden_state
    return found


def export(model: Any, folder: Path = VISION_PATH) -> None:
    """Weights in bfloat16 and all configurations; the tokenizer and the template are there already."""
    write_weights(model, folder)
    config = json.loads(model.config.to_json_string())
    config.update(architectures=["Idefics3ForConditionalGeneration"], dtype="bfloat16")
    config.pop("transformers_version", None)
    write_json(folder / "config.json", config)
    write_json(folder / "preprocessor_config.json", PROCESSOR)
    generation = {"do_sample": False, "eos_token_id": [EOS, PAD], "pad_token_id": PAD, "max_new_tokens": 64}
    write_json(folder / "generation_config.json", generation)
