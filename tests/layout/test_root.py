"""The package's root: what importing it loads, and that its lists of public names are one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from layout.test_layout import ROOT

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


def test_every_public_name_is_there_under_its_own_name_and_for_a_star() -> None:
    """`__init__.pyi` is the list; a line of it in another form than `from MODULE import NAME as NAME` is none."""
    lines = (ROOT / "asyncengine" / "__init__.pyi").read_text(encoding="utf-8").splitlines()
    names = [re.fullmatch(r"from asyncengine\.[\w.]+ import (\w+) as \1", line) for line in lines if "import" in line]
    assert names
    assert [name[1] for name in names if name] == asyncengine.__all__
    assert None not in names
    star: dict[str, object] = {}
    exec("from asyncengine import *", star)
    assert {*asyncengine.__all__} <= {*star} & {*dir(asyncengine)}
    assert asyncengine.errors.EngineError is asyncengine.EngineError
    assert not hasattr(asyncengine, "Engin")
