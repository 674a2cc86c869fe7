"""What planted guesses gain is told with what it is made of, which no disturbed minute can make impossible."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from asyncengine import AsyncEngine
from benchmarks import speculation


async def test_a_ratio_stands_beside_its_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Always right with seven guesses: eight tokens of a pass at most, in 32 tokens four passes behind the first."""
    shape = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100_000, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    shared: dict[str, Any] = {"load_format": "dummy", "dtype": "float32", "prefix_caching": False}
    async with (
        await AsyncEngine.from_pretrained(tmp_path, speculation="off", **shared) as off,
        await AsyncEngine.from_pretrained(tmp_path, speculation_costs=(1.0,) * 3, speculation_memory=1, **shared) as on,
    ):
        await speculation.compare(off, on, 1, 1.0, 7, Namespace(tokens=33, rounds=2))
    assert "8.00 tokens a pass of " in capsys.readouterr().out
