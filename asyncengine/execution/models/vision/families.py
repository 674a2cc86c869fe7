"""Families that read pictures: the text that a picture becomes in a prompt, and the inputs of the vision tower.

A `VisionFamily` has all differences between them. The texts are those of transformers' processors, which cannot be
created without torchvision and a video processor.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

# Image processor of LFM2-VL: transformers' own needs torchvision; this one makes the same tiles with Pillow.

_DEFAULTS: Mapping[str, Any] = tomllib.loads((resources.files(__package__) / "lfm2_processor.toml").read_text("utf-8"))


class Lfm2ImageProcessor:
    """Makes the patches of one picture: of the whole picture, or of its tiles and then of the whole (thumbnail)."""

    def __init__(self, source: Path | Mapping[str, Any]) -> None:
        """`source`: the model's folder, or the settings themselves. Raises `OSError` where the folder has none."""
        from transformers import ImageProcessingMixin

        configured: Mapping[str, Any]
        if isinstance(source, Path):
            configured, _ = ImageProcessingMixin.get_image_processor_dict(str(source), local_files_only=True)
        else:
            configured = source
        self._settings = {name: configured.get(name, default) for name, default in _DEFAULTS.items()}

    def to_json_string(self) -> str:
        return json.dumps(self._settings)

    def __call__(self, images: Sequence[Image], return_tensors: str = "np") -> dict[str, Any]:
        """`pixel_values` float32 [tiles, patches, numbers of a patch], `pixel_attention_mask` int64 [tiles, patches],
        `spatial_shapes` [tiles, 2] (rows and columns of patches), and `columns` and `rows` of tiles."""
        (image,) = images
        settings = self._settings
        patch = settings["encoder_patch_size"]
        columns, rows = self._tiling(image)
        tiles = [image.resize(self._fitting(image), settings["resample"])]
        if columns * rows > 1:
            side = settings["tile_size"]
            large = image.resize((columns * side, rows * side), settings["resample"])
            corners = [(x * side, y * side) for y in range(rows) for x in range(columns)]
            whole = tiles if settings["use_thumbnail"] else []
            tiles = [large.crop((x, y, x + side, y + side)) for x, y in corners] + whole
        shapes = np.array([(tile.height // patch, tile.width // patch) for tile in tiles])
        longest = int(shapes.prod(axis=1).max())
        pixels = np.zeros((len(tiles), longest, 3 * patch**2), dtype=np.float32)
        mask = np.zeros((len(tiles), longest), dtype=np.int64)
        mean, std = (np.array(settings[name], dtype=np.float32) for name in ("image_mean", "image_std"))
        for index, (tile, (high, wide)) in enumerate(zip(tiles, shapes, strict=True)):
            scaled = (np.asarray(tile, dtype=np.float32) * np.float32(settings["rescale_factor"]) - mean) / std
            patches = scaled.reshape(high, patch, wide, patch, 3).swapaxes(1, 2).reshape(high * wide, -1)
            pixels[index, : len(patches)], mask[index, : len(patches)] = patches, 1
        return {
            "pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes, "columns": columns,
            "rows": rows,
        }  # fmt: skip

    def _fitting(self, image: Image) -> tuple[int, int]:
        """(width, height) to which the whole picture is resized: multiples of a token's side, within limits."""
        unit = self._settings["encoder_patch_size"] * self._settings["downsample_factor"]
        least, most = (self._settings[f"{end}_image_tokens"] * unit**2 for end in ("min", "max"))
        sides, area = (image.width, image.height), image.width * image.height
        fitted = [max(unit, round(side / unit) * unit) for side in sides]
        if math.prod(fitted) > most:
            fitted = [max(unit, math.floor(side / math.sqrt(area / most) / unit) * unit) for side in sides]
        elif math.prod(fitted) < least:
            fitted = [math.ceil(side * math.sqrt(least / area) / unit) * unit for side in sides]
        return fitted[0], fitted[1]

    def _tiling(self, image: Image) -> tuple[int, int]:
        """(columns, rows) of tiles into which a large picture is cut; (1, 1) if it is not cut."""
        settings = self._settings
        patch, side = settings["encoder_patch_size"], settings["tile_size"]
        unit = patch * settings["downsample_factor"]
        low, high = settings["min_tiles"], settings["max_tiles"]
        most = settings["max_image_tokens"] * unit**2 * settings["max_pixels_tolerance"]
        covered = math.prod(max(patch, round(length / unit) * unit) for length in image.size)
        if not settings["do_image_splitting"] or low == high == 1 or covered <= most:
            return 1, 1
        best, nearest, wanted = (1, 1), math.inf, image.width / image.height
        grids = [(w, h) for n in range(low, high + 1) for w in range(1, n + 1) for h in range(1, n + 1)]
        for grid in sorted({grid for grid in grids if low <= math.prod(grid) <= high}, key=math.prod):
            distance = abs(wanted - grid[0] / grid[1])
            fills = image.width * image.height > 0.5 * side**2 * math.prod(grid)
            if distance < nearest or (distance == nearest and fills):
                best, nearest = grid, distance
        return best


Made = Mapping[str, Any]
"""Output of the image processor for one picture: numpy arrays with a batch dimension of 1."""
Token = Callable[[str], str]
"""(field of config.json that holds a token id) -> the token's text."""


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """The representation of a picture in a family's prompts."""

    placed: Callable[[Made, Any, Token], str]
    """(processor's output, configuration, texts of tokens) -> the text that stands for the picture."""
    marker: str = "image_token_id"
    """The field of config.json with the token that a chat template writes for a picture."""
    inputs: tuple[str, ...] = ()
    """Further inputs of the tower besides `pixel_values`."""
    grid: Callable[[Made, Any], tuple[int, int]] | None = None
    """(processor's output, configuration) -> (rows, columns) of a picture's tokens; None if positions have one axis."""
    block: Callable[[Any, Any], int] = lambda config, processor: 0
    """(configuration, image processor) -> most tokens of a picture that attend to each other in both directions; 0 if
    its attention is causal."""
    near: bool = False
    """Whether they do so in layers with sliding windows only."""
    processing: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Arguments of the image processor besides those of its settings file."""
    processor: Callable[[Path | Mapping[str, Any]], Any] | None = None
    """Makes the image processor from a folder or from settings; None: transformers' own."""


def _grid(made: Made, config: Any) -> tuple[int, int]:
    """Rows and columns of tokens: the tower merges squares of the grid's patches (Qwen)."""
    merged = config.vision_config.spatial_merge_size
    _, rows, columns = map(int, made["image_grid_thw"][0])
    return rows // merged, columns // merged


def _by_grid(made: Made, config: Any, token: Token) -> str:
    rows, columns = _grid(made, config)
    return token("image_token_id") * (rows * columns)


def _gemma(made: Made, config: Any, token: Token) -> str:
    """The text for the picture, then those for its crops (pan and scan)."""
    inner = token("image_token_id") * config.mm_tokens_per_image
    one = f"\n\n{token('boi_token_index')}{inner}{token('eoi_token_index')}\n\n"
    crops = int(made["num_crops"][0]) if "num_crops" in made else 0
    if not crops:
        return one
    more = " ".join([one] * crops)
    return f"Here is the original image {one} and here are some crops to help you see better {more}"


def _gemma4(made: Made, config: Any, token: Token) -> str:
    inner = token("image_token_id") * int(made["num_soft_tokens_per_image"][0])
    return f"{token('boi_token_id')}{inner}{token('eoi_token_id')}"


def _gemma4_block(config: Any, processor: Any) -> int:
    both = config.get_text_config().use_bidirectional_attention == "vision"  # the small models have none
    return int(processor.max_soft_tokens) if both else 0


def _internvl(made: Made, config: Any, token: Token) -> str:
    """Tokens of all tiles, then of the whole picture if there are several tiles, without separators."""
    sides = zip(config.vision_config.image_size, config.vision_config.patch_size, strict=True)
    inner = math.prod(int(pixels // patch * config.downsample_ratio) for pixels, patch in sides)
    return f"<img>{token('image_token_id') * (inner * int(made['num_patches'][0]))}</img>"


def _lfm2(made: Made, config: Any, token: Token) -> str:
    """Tokens of the tiles, each with its row and column, then of the whole picture."""
    counts = [math.prod(int(side) // config.downsample_factor for side in shape) for shape in made["spatial_shapes"]]
    tiles = [token("image_token_id") * count for count in counts]
    grid = product(range(1, made["rows"] + 1), range(1, made["columns"] + 1))
    names = [f"<|img_row_{row}_col_{column}|>" for row, column in grid]
    names = [*names, "<|img_thumbnail|>"] if len(names) > 1 else [""]
    return f"<|image_start|>{''.join(name + tile for name, tile in zip(names, tiles, strict=False))}<|image_end|>"


def _pixtral(made: Made, config: Any, token: Token) -> str:
    """Tokens row by row, with a text token behind each row."""
    size = config.vision_config.patch_size * config.spatial_merge_size
    rows, columns = (int(pixels) // size for pixels in made["image_sizes"][0])
    row = token("image_token_id") * columns
    return "[IMG_BREAK]".join([row] * rows) + "[IMG_END]"


def _idefics(made: Made, config: Any, token: Token) -> str:
    """Tokens of the tiles, each with its row and column, then of the whole picture; a small picture has no tiles."""
    patches = config.vision_config.image_size // config.vision_config.patch_size
    inner = token("image_token_id") * (patches**2 // config.scale_factor**2)
    around = "<fake_token_around_image>"
    rows, columns = int(made["rows"][0][0]), int(made["cols"][0][0])
    text = ""
    for row in range(1, rows + 1):
        text += "".join(f"{around}<row_{row}_col_{column}>{inner}" for column in range(1, columns + 1)) + "\n"
    return f"{text}\n{around}<global-img>{inner}{around}" if text else f"{around}<global-img>{inner}{around}"


_IDEFICS = VisionFamily(
    _idefics, inputs=("pixel_attention_mask",), processing=lambda config: {"return_row_col_info": True}
)
_QWEN = VisionFamily(_by_grid, inputs=("image_grid_thw",), grid=_grid)
VISION: Mapping[str, VisionFamily] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    **dict.fromkeys(("glm4v", "glm46v", "glm4v_moe"), _QWEN),
    "mistral3": VisionFamily(
        _pixtral,
        inputs=("image_sizes",),
        processing=lambda config: {"patch_size": config.vision_config.patch_size * config.spatial_merge_size},
    ),
    "idefics3": _IDEFICS,
    "smolvlm": _IDEFICS,
    "internvl": VisionFamily(_internvl, processing=lambda config: {"crop_to_patches": True}),
    "lfm2_vl": VisionFamily(_lfm2, inputs=("pixel_attention_mask", "spatial_shapes"), processor=Lfm2ImageProcessor),
    "gemma3": VisionFamily(
        _gemma, marker="boi_token_index", block=lambda config, processor: int(config.mm_tokens_per_image)
    ),
    "gemma4": VisionFamily(_gemma4, inputs=("image_position_ids",), block=_gemma4_block, near=True),
}
"""model_type -> how its prompts represent pictures. Other families of `families.MULTIMODAL` read text alone."""
