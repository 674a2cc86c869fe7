"""One version, wherever it is written, and one address."""

from __future__ import annotations

import json
import re
from pathlib import Path

from layout.test_layout import PYPROJECT

from asyncengine import __version__
from tools.badges import FOLDER, badges

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_is_written_once_and_read_from_there() -> None:
    """pyproject.toml names the place; the README's table, the changelog and what is generated follow."""
    assert PYPROJECT["project"]["dynamic"] == ["version"]
    assert PYPROJECT["tool"]["setuptools"]["dynamic"] == {"version": {"attr": "asyncengine.__version__"}}
    minor = __version__.rpartition(".")[0]
    assert f"| asyncengine {minor} |" in (ROOT / "README.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert next(version for version, rest in sections if "unreleased" not in rest) == __version__
    document = ROOT / "integrations" / "http" / "page" / "openapi.json"
    assert json.loads(document.read_text(encoding="utf-8"))["info"]["version"] == __version__


def test_badges_say_what_the_project_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, text in badges().items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, "python -m tools.badges"
        assert f"(docs/images/{name})" in readme


def test_the_project_has_one_address() -> None:
    urls = PYPROJECT["project"]["urls"]
    assert {"Homepage", "Documentation", "Source", "Issues", "Changelog"} <= urls.keys()
    assert {re.match(r"https://[^/]+", url)[0] for url in urls.values()} == {urls["Homepage"]}  # type: ignore[index]
