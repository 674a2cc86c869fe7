"""The site has every page, and links that hold in the repository hold there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tools import site
from tools.site import outside, rewritten, site_path, targets

ROOT = Path(__file__).resolve().parents[2]
SETTINGS: dict[str, Any] = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


EVERYTHING = [*PAGES, *(path for path in outside(PAGES, read) if path.endswith(".md"))]


def named(entry: Any) -> list[str]:
    """The pages of a part of the navigation."""
    if isinstance(entry, str):
        return [entry]
    return [page for part in (entry.values() if isinstance(entry, dict) else entry) for page in named(part)]


def test_the_navigation_names_every_page_once() -> None:
    found = named(SETTINGS["nav"])
    assert sorted(f"docs/{page}" for page in found) == PAGES
    assert len(set(found)) == len(found)


def test_the_index_leads_to_every_page() -> None:
    assert set(PAGES) - set(targets(read("docs/index.md"), "docs/index.md")) == {"docs/index.md"}


def heading_ids(text: str) -> set[str]:
    """Ids of headings as code hosts and mkdocs both make them of words, digits and hyphens."""
    headings = re.findall(r"^#+ (.*)$", site.FENCED.sub("", text), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading.lower()).strip() for heading in headings)
    return {re.sub(r"\s", "-", heading) for heading in words}


def test_links_lead_to_files_and_headings() -> None:
    for page in EVERYTHING:
        for match in site.LINK.finditer(site.FENCED.sub("", read(page))):
            target = (ROOT / page).parent / match[2]
            assert target.exists(), f"{page}: {match[0]}"
            if match[3] and target.suffix == ".md":
                assert match[3][1:] in heading_ids(target.read_text(encoding="utf-8")), f"{page}: {match[0]}"


def test_links_on_the_site_lead_to_what_is_there() -> None:
    docs = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.*")]
    there = {site_path(path) for path in [*docs, *outside(PAGES, read)]}
    for page in EVERYTHING:
        folder = Path(site_path(page)).parent
        for match in site.LINK.finditer(site.FENCED.sub("", rewritten(read(page), page))):
            target = (ROOT / folder / match[2]).resolve().relative_to(ROOT).as_posix()
            assert target in there, f"{page}: {match[0]}"
