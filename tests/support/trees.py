"""Syntax trees of source files."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file's tree, its module first. Nobody may change them."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
