"""Tiny random checkpoints that read pictures: with a tower, an image processor, a tokenizer and a chat template."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from support.multimodal_models import CONFIGS, randomize

from asyncengine.demo import MODEL_PATH
from asyncengine.execution.models.vision.families import Lfm2ImageProcessor

TOKENS = [
    "<|vision_start|>", "<|vision_end|>", "<|image|>", "<|begin|>", "<|end|>", "<|break|>", "<|video|>", "[IMG_BREAK]",
    "[IMG_END]", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>",
    "<row_2_col_2>", "<img>", "</img>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2)),
]  # fmt: skip
"""Tokens added to the demo model's tokenizer, in this order."""
VOCAB = 2048 + len(TOKENS)
IMAGE, BEGIN, END, BREAK, VIDEO = (
    2048 + TOKENS.index(f"<|{name}|>") for name in ("image", "begin", "end", "break", "video")
)
_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}MARKER{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSORS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("picture_processors.json").read_text(encoding="utf-8")
)
"""Contents of preprocessor_config.json, by model."""
MARKERS = {"gemma3": "<|begin|>"} | dict.fromkeys(
    ("mistral3", "idefics3", "smolvlm", "gemma4", "gemma4-small", "internvl", "lfm2_vl"), "<|image|>"
)


def _config(name: str) -> Any:
    config = CONFIGS[name.removesuffix("-small")]()
    text = config.get_text_config()
    text.vocab_size = VOCAB
    text.eos_token_id = text.pad_token_id = None
    if name.startswith("gemma4"):
        config.image_token_id, config.boi_token_id, config.eoi_token_id = IMAGE, BEGIN, END
        config.audio_token_id = config.video_token_id = VIDEO
        config.vision_config.patch_size = 4
        text.pad_token_id, text.vocab_size_per_layer_input = 0, VOCAB
        text.sliding_window = 80  # a picture has some 70 tokens
        if name == "gemma4-small":
            text.use_bidirectional_attention, text.sliding_window = None, 24
        else:
            text.hidden_size_per_layer_input = text.num_kv_shared_layers = 0
    elif name == "gemma3":
        config.image_token_id, config.boi_token_index, config.eoi_token_index = IMAGE, BEGIN, END
        config.mm_tokens_per_image = 4
        config.image_token_index = IMAGE
    elif name in ("idefics3", "smolvlm", "mistral3", "internvl", "lfm2_vl"):
        config.image_token_id = config.image_token_index = IMAGE
    else:
        config.image_token_id, config.video_token_id = IMAGE, VIDEO
        config.vision_config.temporal_patch_size = 2
    if name.startswith("qwen2_5"):
        config.vision_config.window_size = 16
        config.vision_config.depth = 2
    return config


def save_picture_model(
    name: str, folder: Path, seed: int = 0, edit: Callable[[Any], object] = lambda config: None
) -> Any:
    """Write such a checkpoint, and return transformers' model. `edit`: told of its configuration before it is made."""
    config = _config(name)
    edit(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    randomize(model, name, torch.Generator().manual_seed(seed))
    hf.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(str(MODEL_PATH))
    tokenizer.add_special_tokens({"additional_special_tokens": TOKENS})
    marker = MARKERS.get(name, "<|vision_start|><|image|><|vision_end|>")
    tokenizer.chat_template = _TEMPLATE.replace("MARKER", marker)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSORS[name]))
    return model


def picture(seed: int, size: tuple[int, int] = (24, 40)) -> Image.Image:
    """A picture of some large squares in random colours, which no resizing makes grey."""
    squares = np.random.default_rng(seed).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(squares).resize(size, Image.Resampling.NEAREST)


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def chat(*parts: str | Image.Image) -> list[dict[str, Any]]:
    """A user's message of texts and pictures."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


def words(seed: int, count: int) -> str:
    generator = random.Random(seed)
    return " ".join(generator.choice(["red", "green", "cat", "dog", "house", "seven", "blue"]) for _ in range(count))


def _tower_arguments(family: str, folder: Path, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    if family == "lfm2_vl":  # transformers has none without torchvision
        each = [Lfm2ImageProcessor(folder)([image]) for image in images]
        longest = max(len(made["pixel_values"][0]) for made in each)
        found: dict[str, list[torch.Tensor]] = {}
        for made in each:
            for key in ("pixel_values", "pixel_attention_mask", "spatial_shapes"):
                part = torch.from_numpy(made[key])
                if key != "spatial_shapes":
                    padded = part.new_zeros(len(part), longest, *part.shape[2:])
                    padded[:, : part.shape[1]] = part
                    part = padded
                found.setdefault(key, []).append(part)
        return {key: torch.cat(parts) for key, parts in found.items()}
    # as the family's own processor has it
    merged = {"mistral3": {"patch_size": 8}, "internvl": {"crop_to_patches": True}}.get(family, {})
    processor = hf.AutoImageProcessor.from_pretrained(folder, backend="pil")
    inputs = processor(images=list(images), return_tensors="pt", **merged)
    known = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask", "image_position_ids")
    return {key: inputs[key] for key in known if key in inputs}


@torch.inference_mode()
def expected_logits(model: Any, folder: Path, ids: Sequence[int], images: Sequence[Image.Image]) -> torch.Tensor:
    """transformers' logits [tokens, vocabulary] of a prompt with placeholders, and what follows it."""
    model.set_attn_implementation("eager")
    tokens = torch.tensor([list(ids)])
    kinds = (tokens == IMAGE).long()
    given: dict[str, Any] = {}
    if images:
        given = _tower_arguments(model.config.model_type, folder, images)
    if model.config.model_type in ("mistral3", "idefics3", "smolvlm", "internvl", "lfm2_vl"):
        plain: torch.Tensor = model(tokens, use_cache=False, **given).logits[0].float()
        return plain
    types = "token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids"
    found: torch.Tensor = model(tokens, use_cache=False, **given, **{types: kinds}).logits[0].float()
    return found
