"""Scripts that no test runs still import what there is."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
from support.trees import nodes_of

ROOT = Path(__file__).parents[2]
OURS = ("asyncengine", "benchmarks", "makers", "tools", "tests", "support")


@pytest.mark.parametrize("folder", ["benchmarks", "examples", "makers", "tests/gpu", "tools"])
def test_names_of_ours_exist(folder: str) -> None:
    missing = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in nodes_of(path):
            if not isinstance(node, ast.ImportFrom) or node.level or (node.module or "").split(".")[0] not in OURS:
                continue
            for name in (alias.name for alias in node.names):
                try:
                    module = importlib.import_module(node.module or "")
                    if not hasattr(module, name):
                        importlib.import_module(f"{node.module}.{name}")
                except ModuleNotFoundError as error:
                    if (error.name or "").split(".")[0] in OURS:  # others need not be installed
                        missing.append(f"{path.relative_to(ROOT)}: {node.module}.{name}")
    assert not missing
