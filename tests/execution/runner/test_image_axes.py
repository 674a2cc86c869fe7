"""Positions with three axes, of prompts with pictures."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from asyncengine.execution.runner.step_inputs import axes_of
from asyncengine.images import ImageSpan, PromptImage


def picture(rows: int, columns: int) -> PromptImage:
    return PromptImage(b"a" * 16, rows * columns, 4 * rows * columns, dict, (rows, columns))


@pytest.mark.parametrize("seed", range(5))
def test_axes_are_those_of_transformers(seed: int) -> None:
    """Axes come in pieces of any size, of prompts of several images and of what follows them."""
    chance = random.Random(seed)
    spans: list[ImageSpan] = []
    grids: list[list[int]] = []
    kinds: list[int] = []
    for _ in range(chance.randrange(1, 4)):
        kinds += [0] * chance.randrange(1, 6)
        rows, columns = chance.randrange(1, 6), chance.randrange(1, 6)
        spans.append(ImageSpan(picture(rows, columns), len(kinds), rows * columns))
        grids.append([1, 2 * rows, 2 * columns])
        kinds += [1] * (rows * columns)
    kinds += [0] * 3
    config: Any = hf.Qwen2_5_VLConfig(vision_config={"spatial_merge_size": 2})
    model: Any = hf.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLModel
    holder = type("", (), {"config": config, "get_vision_position_ids": model.get_vision_position_ids})()
    ids = torch.zeros(1, len(kinds), dtype=torch.int64)
    expected, delta = model.get_rope_index(holder, ids, torch.tensor([kinds]), torch.tensor(grids))
    assert np.array_equal(axes_of(spans, 0, len(kinds)), expected[:, 0].numpy())
    after = axes_of(spans, len(kinds), len(kinds) + 2)
    assert after.tolist() == [[len(kinds) + int(delta) + place for place in range(2)]] * 3
    whole = axes_of(spans, 0, len(kinds) + 2)
    for size in (1, 2, 5, 7):
        parts = [axes_of(spans, low, min(low + size, len(kinds) + 2)) for low in range(0, len(kinds) + 2, size)]
        assert np.array_equal(np.concatenate(parts, axis=1), whole)
