"""The documentation site, from the same files that a code host shows: hooks of mkdocs (`hooks:` in mkdocs.yml).

    pip install "asyncengine[docs]" && REPOSITORY_URL=https://... mkdocs build --strict

`REPOSITORY_URL` is where the header's link to the repository leads; without it there is none.

Pages link to each other, and to files outside of docs/, by their paths in the repository. Such files become part of the
site, under `repository/`, and links are written anew for where pages lie there. The search leaves them out: records of
old measurements have more words than the pages that say how to do a thing. A folder is no page: what links to one
is plain text on the site.
"""

from __future__ import annotations

import importlib
import os
import posixpath
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS, OUTSIDE = "docs/", "repository/"
LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
"""Words, target and anchor."""
FENCED = re.compile(r"^(```.*?^```)$", re.DOTALL | re.MULTILINE)


def targets(text: str, path: str) -> list[str]:
    """Paths in the repository that a page at `path` links to."""
    return [_resolved(path, match[2]) for match in LINK.finditer(FENCED.sub("", text))]


def outside(pages: Iterable[str], read: Callable[[str], str]) -> list[str]:
    """Files outside of docs/ that `pages` lead to, directly or over other such pages; paths in the repository."""
    found: dict[str, None] = {}
    waiting = list(pages)
    while waiting:
        page = waiting.pop()
        for target in targets(read(page), page):
            if not target.startswith(DOCS) and target not in found and not (ROOT / target).is_dir():
                found[target] = None
                if target.endswith(".md"):
                    waiting.append(target)
    return sorted(found)


def site_path(path: str) -> str:
    """Address of a file of the repository on the site."""
    return path.removeprefix(DOCS) if path.startswith(DOCS) else OUTSIDE + path


def repository_path(path: str) -> str:
    """The path in the repository of what lies at `path` on the site."""
    return path.removeprefix(OUTSIDE) if path.startswith(OUTSIDE) else DOCS + path


def rewritten(text: str, path: str) -> str:
    """The text of the page at `path` of the repository, its links as the site has them."""
    folder = posixpath.dirname(site_path(path))

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match[1], _resolved(path, match[2]), match[3] or ""
        if (ROOT / target).is_dir():
            return words
        return f"[{words}]({posixpath.relpath(site_path(target), folder or '.')}{anchor})"

    parts = FENCED.split(text)  # what is fenced is at the odd places
    return "".join(part if place % 2 else LINK.sub(link, part) for place, part in enumerate(parts))


def _resolved(path: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), target))


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to outside of docs/."""
    made = importlib.import_module("mkdocs.structure.files").File
    pages = [repository_path(file.src_uri) for file in files.documentation_pages()]
    for path in outside(pages, lambda page: (ROOT / page).read_text(encoding="utf-8")):
        files.append(made.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    return files


def on_config(config: Any) -> Any:
    """Link to the repository."""
    if url := os.environ.get("REPOSITORY_URL"):
        config.repo_url, config.repo_name = url, "Repository"
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Write a page's links anew, and leave those of the repository out of the search."""
    if page.file.src_uri.startswith(OUTSIDE):
        page.meta["search"] = {"exclude": True}
    return rewritten(markdown, repository_path(page.file.src_uri))
