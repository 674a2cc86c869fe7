"""Image processor of LFM2-VL, of which transformers has one with torchvision alone: the same tiles, by Pillow."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

_DEFAULTS: Mapping[str, Any] = {
    "downsample_factor": 2, "do_image_splitting": True, "min_tiles": 2, "max_tiles": 10, "use_thumbnail": True,
    "min_image_tokens": 64, "max_image_tokens": 256, "encoder_patch_size": 16, "tile_size": 512,
    "max_pixels_tolerance": 2.0, "resample": 2, "rescale_factor": 1 / 255, "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}  # fmt: skip


class Lfm2ImageProcessor:
    """Makes patches of one picture: of the whole, or of its tiles and then of the whole."""

    def __init__(self, source: Path | Mapping[str, Any]) -> None:
        """`source`: the model's folder, or the settings themselves. Raises `OSError` where the folder has none."""
        from transformers import ImageProcessingMixin

        found: Mapping[str, Any]
        if isinstance(source, Path):
            found, _ = ImageProcessingMixin.get_image_processor_dict(str(source), local_files_only=True)
        else:
            found = source
        self._settings = {name: found.get(name, default) for name, default in _DEFAULTS.items()}

    def to_json_string(self) -> str:
        return json.dumps(self._settings)

    def __call__(self, images: Sequence[Image], return_tensors: str = "np") -> dict[str, Any]:
        """`pixel_values` [tiles, patches, numbers of one], masks and sizes (in patches) of these, and how many columns
        and rows of tiles there are before the whole."""
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
        """(width, height) of the whole picture as the tower sees it: multiples of a token's side, within limits."""
        unit = self._settings["encoder_patch_size"] * self._settings["downsample_factor"]
        least, most = (self._settings[f"{end}_image_tokens"] * unit**2 for end in ("min", "max"))
        sides, area = (image.width, image.height), image.width * image.height
        found = [max(unit, round(side / unit) * unit) for side in sides]
        if math.prod(found) > most:
            found = [max(unit, math.floor(side / math.sqrt(area / most) / unit) * unit) for side in sides]
        elif math.prod(found) < least:
            found = [math.ceil(side * math.sqrt(least / area) / unit) * unit for side in sides]
        return found[0], found[1]

    def _tiling(self, image: Image) -> tuple[int, int]:
        """(columns, rows) of tiles into which a large picture is cut; (1, 1): it is not."""
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
