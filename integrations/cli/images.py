"""Pictures that a command is given as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncengine.info import ModelInfo
from asyncengine.integrations.cli.errors import CliError


def image_part(path: str | Path, most: int) -> dict[str, Any]:
    """The content part of a picture. Its file is read now, as far as the engine's limit of `most` bytes, so that a
    conversation stays the same when it changes. Raises `CliError`."""
    try:
        with Path(path).expanduser().open("rb") as file:
            return {"type": "image", "image": file.read(most + 1)}
    except (OSError, ValueError, RuntimeError) as error:
        raise CliError(f"image: cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def check_reads_images(info: ModelInfo) -> None:
    """Raises `CliError` for a model that reads no pictures."""
    if info.no_images is not None:
        raise CliError(f"image: {info.name} takes no pictures: {info.no_images}")
