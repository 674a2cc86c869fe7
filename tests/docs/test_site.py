"""The site has every page, and links that hold in the repository hold there."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tools import site
from tools.site import outside, repository_path, rewritten, site_path, targets

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


def test_a_wrong_link_fails_the_build() -> None:
    assert SETTINGS["strict"] is True
    assert {"anchors": "warn", "unrecognized_links": "warn"}.items() <= SETTINGS["validation"].items()
    assert [str(Path(path)) for path in SETTINGS["hooks"]] == ["tools/site.py"]


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


def test_links_are_written_anew() -> None:
    assert rewritten("[a](../CHANGELOG.md#x) [b](howto/fleet.md)", "docs/tour.md") == (
        "[a](repository/CHANGELOG.md#x) [b](howto/fleet.md)"
    )
    assert rewritten("[a](docs/tour.md)", "CHANGELOG.md") == "[a](../tour.md)"
    assert rewritten("see [examples](../examples)", "docs/tour.md") == "see examples", "a folder is no page"
    assert rewritten("```text\n[a](../b.md)\n```\n", "docs/tour.md") == "```text\n[a](../b.md)\n```\n"
    assert repository_path(site_path("docs/howto/fleet.md")) == "docs/howto/fleet.md"
    assert repository_path(site_path("benchmarks/README.md")) == "benchmarks/README.md"


def test_the_search_leaves_out_records_and_the_header_links_to_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    for path, excluded in (("repository/benchmarks/results/x.md", {"exclude": True}), ("howto/fleet.md", None)):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=path), meta=dict[str, Any]())
        site.on_page_markdown("words", page, None, None)
        assert page.meta.get("search") == excluded
    monkeypatch.setenv("REPOSITORY_URL", "https://code.example/asyncengine")
    assert site.on_config(SimpleNamespace()).repo_url == "https://code.example/asyncengine"
    schemes = [each["toggle"]["name"] for each in SETTINGS["theme"]["palette"]]
    assert len(schemes) == 3


def test_today_s_figures_fit_their_page() -> None:
    assert len(read("docs/performance.md").splitlines()) <= 250
