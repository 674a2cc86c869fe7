"""The package's root: what importing it loads, and that its lists of public names are one."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from layout.test_layout import ROOT
from support.trees import nodes_of

import asyncengine

HEAVY = ("torch", "numpy", "transformers", "anyio", "asyncio", "argparse", "logging", "subprocess")


@pytest.mark.parametrize(
    ("module", "own"),
    [("asyncengine", ("asyncengine",)), ("asyncengine.grammar", ("asyncengine", "asyncengine.errors"))],
)
def test_importing_the_root_loads_next_to_nothing(module: str, own: tuple[str, ...]) -> None:
    """In an interpreter that has loaded nothing of its own (-S): a .pth file may import what it will."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import {module}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    ours = {name for name in loaded if name.startswith("asyncengine") and not name.startswith("asyncengine.grammar")}
    assert ours == set(own)
    assert not {*HEAVY} & {*loaded}


def test_public_names_are_the_same_for_type_checkers_for_the_table_and_for_a_star() -> None:
    nodes = nodes_of(ROOT / "asyncengine" / "__init__.py")
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").count(".")]
    seen = {alias.name: (node.module or "").removeprefix("asyncengine.") for node in imports for alias in node.names}
    assert seen == asyncengine._MODULES
    assert seen
    assert sorted(seen) == sorted(asyncengine.__all__)
    star: dict[str, object] = {}
    exec("from asyncengine import *", star)
    assert {*asyncengine.__all__} <= {*star} & {*dir(asyncengine)}
    assert asyncengine.errors.EngineError is asyncengine.EngineError
    assert not hasattr(asyncengine, "Engin")
