"""One version, wherever it is written."""

from __future__ import annotations

import re
from pathlib import Path

from layout.test_layout import PYPROJECT

from asyncengine import __version__

ROOT = Path(__file__).resolve().parents[2]


def test_every_place_says_the_same_version() -> None:
    """The project's, the package's, the README's table, and the newest section of the changelog that is no plan."""
    assert PYPROJECT["project"]["version"] == __version__
    minor = __version__.rpartition(".")[0]
    assert f"| asyncengine {minor} |" in (ROOT / "README.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert next(version for version, rest in sections if "unreleased" not in rest) == __version__
