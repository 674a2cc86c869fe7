"""Checkpoints that people use, for the tests in tests/real; nothing of them is in the repository."""

from __future__ import annotations

import os
import pydoc_data.topics
from pathlib import Path

import pytest

VARIABLE = "ASYNCENGINE_REAL_MODELS"
COMMAND = f"python tests/real/fetch.py FOLDER && {VARIABLE}=FOLDER python -m pytest tests/real"


def real_model(name: str) -> Path:
    """The folder of a model that tests/real/fetch.py has fetched. Skips the test where none was asked for, and fails it
    where the folder that was named does not have it."""
    folder = os.environ.get(VARIABLE)
    if not folder:
        pytest.skip(f"needs real models: {COMMAND}")
    found = Path(folder) / name
    if not found.is_dir():
        pytest.fail(
            f"{VARIABLE} names {folder}, where no {name} is: python tests/real/fetch.py {folder}", pytrace=False
        )
    return found


def paragraphs() -> list[str]:
    """English that the interpreter brings along: the Python language reference, as `help()` shows it."""
    topics = pydoc_data.topics.topics
    return [text for topic in sorted(topics) for text in topics[topic].split("\n\n") if text.strip()]
