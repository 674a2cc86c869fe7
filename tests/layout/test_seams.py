"""The walls between the six units of the package, and how many names lead from one into another today.

The numbers are ceilings, which may only fall: whoever takes a name away lowers them, and a feature that needs one more
says so in its change. Core is what schedules requests and keeps the cache; execution is what computes a step. Every
unit may import plain data of the package's root: errors, parameters, `step` and the protocols of `seams`.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from support.trees import nodes_of

UNITS = {
    "execution": ("execution", "lora.layers"),
    "kernels": ("kernels",),
    "grammar": ("grammar",),
    "integrations": ("integrations", "serve", "cluster", "cli", "training", "__main__"),
}
"""Rooms by unit. All others are core's."""
ASSEMBLY = ("build", "assembly")
"""Rooms of core that put the concrete parts together, and so may name them."""
FLEET = ("integrations.fleet", "integrations.placement")
TRAINER = ("integrations.trl", "training")
SHARED = ("asyncengine.errors", "asyncengine.checks", "asyncengine.seams")
CEILINGS = {
    "core knows execution": 0,
    "execution knows core": 0,
    "assembly knows execution": 6,
    "all know kernels": 36,
    "the fleet knows core": 8,
    "integrations know deep names": 13,
    "the trainer knows deep names": 8,
    "core knows integrations": 0,
    "grammar knows core": 8,
}
SET_FROM_OUTSIDE = {"assembly": 0, "execution/runner/building.py": 0}
"""Attributes that builders set of objects that are made already: each is one that its owner does not yet get when it
is made."""

ROOT = Path(__file__).resolve().parents[2]


def sources() -> list[tuple[str, Path]]:
    """(module name, file) of the package, its links into other folders included."""
    files = [
        Path(folder, name) for folder, _, names in os.walk(ROOT / "asyncengine", followlinks=True) for name in names
    ]
    modules = ((".".join(path.relative_to(ROOT).with_suffix("").parts), path) for path in files if path.suffix == ".py")
    return [(module.removesuffix(".__init__"), path) for module, path in modules]


def within(module: str, rooms: tuple[str, ...]) -> bool:
    inner = module.removeprefix("asyncengine.")
    return any(inner == room or inner.startswith(f"{room}.") for room in rooms)


def unit_of(module: str) -> str:
    return next((unit for unit, rooms in UNITS.items() if within(module, rooms)), "core")


def names() -> Iterator[tuple[str, str, str]]:
    """(module that imports, module imported from, name) of the package's own imports, those for types alone too."""
    modules = {module for module, _ in sources()}
    for module, path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("asyncengine"):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    yield (module, whole, "") if whole in modules else (module, node.module or "", alias.name)
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("asyncengine."):
                        yield module, alias.name, ""


def crossing(wall: str) -> set[tuple[str, str]]:
    """Names that cross a wall, each counted once."""
    found = set()
    for here, there, name in names():
        mine, theirs = unit_of(here), unit_of(there)
        crosses = {
            "core knows execution": mine == "core" and not within(here, ASSEMBLY) and theirs == "execution",
            "execution knows core": mine == "execution" and theirs == "core" and there.count(".") > 1,
            "assembly knows execution": within(here, ASSEMBLY) and theirs == "execution",
            "all know kernels": mine != "kernels" and theirs == "kernels",
            "the fleet knows core": within(here, FLEET) and theirs == "core" and there.count(".") > 1,
            "integrations know deep names": mine == "integrations" != theirs
            and not within(here, (*FLEET, *TRAINER))
            and there.count(".") > 1,
            "the trainer knows deep names": within(here, TRAINER) and theirs != mine and there.count(".") > 1,
            "core knows integrations": mine == "core" and theirs == "integrations",
            "grammar knows core": mine == "grammar" and theirs == "core" and there not in SHARED,
        }
        if crosses[wall]:
            found.add((there, name))
    return found


@pytest.mark.parametrize("wall", CEILINGS)
def test_no_more_names_cross_a_wall(wall: str) -> None:
    found = crossing(wall)
    assert len(found) <= CEILINGS[wall], "\n".join(".".join(each) for each in sorted(found))
    assert len(found) == CEILINGS[wall], f"{len(found)} are left: lower the ceiling"


def test_kernels_have_one_door() -> None:
    assert {module for module, _ in crossing("all know kernels")} == {"asyncengine.kernels.api"}


def set_from_outside(tree: Iterable[ast.AST]) -> list[str]:
    """Assignments to an attribute of another object than `self`."""
    found = []
    for node in tree:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
        for each in (inner for target in targets for inner in ast.walk(target)):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                name = ast.unparse(each)
                found += [] if name == f"self.{each.attr}" else [f"{node.lineno}: {name}"]
    return found


@pytest.mark.parametrize("folder", SET_FROM_OUTSIDE)
def test_builders_complete_no_more_objects_from_outside(folder: str) -> None:
    """Builders are to construct objects with all that they need. `relay.py` builds nothing."""
    assert set_from_outside(ast.walk(ast.parse("a.b = c.d, self.e = 1\nf.g += 1"))) == ["1: a.b", "1: c.d", "2: f.g"]
    path = ROOT / "asyncengine" / folder
    files = [each for each in path.glob("*.py") if each.name != "relay.py"] if path.is_dir() else [path]
    found = [f"{file.name}:{each}" for file in files for each in set_from_outside(nodes_of(file))]
    assert len(found) == SET_FROM_OUTSIDE[folder], "\n".join(found)
