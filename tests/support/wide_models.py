"""Tiny checkpoints with heads of 64 dimensions, the smallest that FlashInfer's kernels take."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from support import tiny_models
from support.tiny_configs import WIDE
from support.tiny_models import make_checkpoint

CHUNK = 12
"""Tokens of a chunk of Llama 4's attention: three pages of the tests."""


def make_wide(name: str, folder: Path) -> Path:
    """Write a random checkpoint of `WIDE[name]` into `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny_models.FAMILIES, name, WIDE[name])
        return make_checkpoint(name, folder)


def wide_folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A fixture of a module: the checkpoint of each name, written once."""
    return cache(lambda name: make_wide(name, tmp_path_factory.mktemp("wide") / name))
