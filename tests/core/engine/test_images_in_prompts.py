"""Pictures as plain data: ids that are their content, and positions with three axes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from asyncengine.execution.runner.images import axes_of
from asyncengine.images import ImageSpan, PromptImage, with_identity, without_identity


def image(digest: bytes, tokens: int, grid: tuple[int, int] | None = None) -> PromptImage:
    return PromptImage(digest, tokens, 4 * tokens, dict, grid)


def test_no_two_pictures_share_an_id() -> None:
    """Digests that differ in their first or last bit only, or in how index and digest could run into each other."""
    zero, one = bytes(16), bytes(15) + b"\x01"
    digests = [
        zero,
        one,
        b"\x80" + bytes(15),
        b"\xff" * 16,
        bytes(11) + b"\x01" + bytes(4),
        bytes(12) + b"\x01" + bytes(3),
    ]
    spans = [ImageSpan(image(digest, 5000), 0, 5000) for digest in digests]
    ids = [token for span in spans for token in span.ids()]
    assert len(set(ids)) == len(ids) == 30_000
    assert max(ids) < 0
    again = ImageSpan(image(bytes(15) + b"\x01", 5000), 7, 3, 2)
    assert again.ids() == spans[1].ids()[2:5]


def test_the_prompt_comes_back_with_placeholders() -> None:
    spans = (ImageSpan(image(b"a" * 16, 5), 2, 3, 0, 9), ImageSpan(image(b"a" * 16, 5), 6, 2, 3, 9))
    prompt = (1, 2, 9, 9, 9, 3, 9, 9, 4)
    named = with_identity(prompt, spans)
    assert [token for token in named if token >= 0] == [1, 2, 3, 4]
    assert len(set(named)) == 9
    assert without_identity(named, spans) == prompt


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
        spans.append(ImageSpan(image(b"a" * 16, rows * columns, (rows, columns)), len(kinds), rows * columns))
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
