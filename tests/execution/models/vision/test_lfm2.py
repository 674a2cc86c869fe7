"""The image processor of LFM2-VL makes what transformers 5.24's makes with torchvision, from which numbers are here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from asyncengine.execution.models.vision.families import Lfm2ImageProcessor

EXPECTED: dict[tuple[int, int], tuple[int, int, list[int], list[float]]] = {
    (640, 480): (1, 1, [26, 36], [0.2863]),
    (64, 64): (1, 1, [16, 16], [0.2863]),
    (24, 900): (1, 1, [98, 4], [0.2863]),
    (1024, 1024): (2, 2, [32, 32], [0.6444, -0.0144, -0.0824, -0.1739, 0.2863]),
    (300, 2000): (1, 7, [82, 12], [0.6444, 0.6444, 0.2863, 0.2863, 0.2863, -0.0824, -0.0824, 0.2863]),
    (1920, 1080): (
        4, 2, [24, 42], [0.6444, 0.6444, -0.0144, 0.3072, -0.0824, -0.0824, -0.1739, -0.5451, 0.2863],
    ),
    (1300, 500): (
        5, 2, [18, 50],
        [0.6444, 0.6444, -0.0144, -0.0144, 0.3072, -0.0824, -0.0824, -0.1739, -0.1739, -0.5451, 0.2863],
    ),
}  # fmt: skip
"""(width, height) -> columns and rows of tiles, patches of the whole picture (rows, columns), and the mean of the patch
in the middle of each tile, of a picture of nine squares."""


def processor(folder: Path, **settings: object) -> Lfm2ImageProcessor:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return Lfm2ImageProcessor(folder)


@pytest.mark.parametrize("size", EXPECTED)
def test_tiles_are_those_of_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    squares = np.random.default_rng(3).integers(0, 255, (3, 3, 3), dtype=np.uint8)
    made = processor(tmp_path)([Image.fromarray(squares).resize(size, Image.Resampling.NEAREST)])
    columns, rows, whole, means = EXPECTED[size]
    assert (made["columns"], made["rows"]) == (columns, rows)
    assert made["spatial_shapes"].tolist() == [[32, 32]] * (len(means) - 1) + [whole]
    assert made["pixel_attention_mask"].sum(axis=1).tolist() == made["spatial_shapes"].prod(axis=1).tolist()
    middles = [
        float(tile[int(own.sum()) // 2].mean())
        for tile, own in zip(made["pixel_values"], made["pixel_attention_mask"], strict=True)
    ]
    assert middles == pytest.approx(means, abs=2e-4)


def test_settings_are_those_of_the_folder(tmp_path: Path) -> None:
    image = Image.new("RGB", (1024, 1024))
    assert len(processor(tmp_path, use_thumbnail=False)([image])["pixel_values"]) == 4
    assert len(processor(tmp_path, do_image_splitting=False)([image])["pixel_values"]) == 1
    assert processor(tmp_path, max_image_tokens=64)([Image.new("RGB", (300, 300))])["spatial_shapes"].tolist() == [
        [16, 16]
    ]
    assert processor(tmp_path).to_json_string() != processor(tmp_path, tile_size=256).to_json_string()
