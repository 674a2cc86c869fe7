"""Rotation by transformers' frequencies, of halves and of neighbours, from the table and beyond it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.layer_options import CPU

from asyncengine.execution.layers import rotary as rotary_module
from asyncengine.execution.layers.rotary import Rotary, RotaryConfig


@pytest.mark.parametrize("style", ["halves", "interleaved"])
def test_beyond_the_table_angles_are_those_of_a_larger_one(style: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = RotaryConfig(tuple((10000.0 ** -torch.linspace(0, 1, 8)).tolist()), 1.3, style)
    whole = Rotary(config, 300, torch.float32, CPU)
    monkeypatch.setattr(rotary_module, "_TABLE", 50)
    short = Rotary(config, 300, torch.float32, CPU)
    for count in (1, 7, 100):  # rows are copied by a kernel, or by torch
        for first in (0, 43, 50, 200):
            positions = torch.arange(first, first + count)
            for left, right in zip(short(positions)[:2], whole(positions)[:2], strict=True):
                assert torch.equal(left, right)
