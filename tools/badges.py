"""docs/images/badge_*.svg: the README's badges, drawn from pyproject.toml and the package's version.

    python -m tools.badges           writes the files

Drawn here, as no other host needs to be asked for a picture then, by a reader of the README or of the site.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from asyncengine import __version__

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "images"
LETTER = 6.6
"""Width of a letter in the badges' size, on average."""


def badge(label: str, value: str, color: str) -> str:
    """SVG of one badge: a grey label, and its value on a color."""
    left, right = (round(LETTER * len(text) + 12) for text in (label, value))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" '
        f'aria-label="{label}: {value}"><title>{label}: {value}</title>'
        f'<rect width="{left + right}" height="20" rx="3" fill="#555"/>'
        f'<path d="M{left} 0h{right - 3}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3h-{right - 3}z" fill="{color}"/>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f'<text x="{left / 2:g}" y="14">{label}</text><text x="{left + right / 2:g}" y="14">{value}</text></g></svg>\n'
    )


def badges() -> dict[str, str]:
    """Every badge by its file's name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = [found for each in project["classifiers"] if (found := re.findall(r"Python :: (3\.\d+)$", each))]
    pythons = f"{versions[0][0]} to {versions[-1][0]}"
    texts = {
        "version": (__version__, "#1f5fbf"), "python": (pythons, "#1f5fbf"),
        "license": (project["license"], "#2e7d32"), "typing": ("strict", "#2e7d32"),
    }  # fmt: skip
    return {f"badge_{label}.svg": badge(label, value, color) for label, (value, color) in texts.items()}


if __name__ == "__main__":
    for name, text in badges().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
