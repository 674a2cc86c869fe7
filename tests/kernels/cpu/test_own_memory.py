"""Memory that a kernel allocates for itself lasts for as long as its address is used."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from asyncengine.kernels import cpu

KERNELS = sorted(Path(cpu.__file__).parent.glob("*.py"))


def owned(function: ast.FunctionDef) -> set[str]:
    """Names of arrays that a function allocates."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            targets = node.targets[0].elts if isinstance(node.targets[0], ast.Tuple) else node.targets
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for target, value in zip(targets, values, strict=False):
                if isinstance(target, ast.Name) and ast.unparse(value).startswith(("np.empty(", "np.zeros(")):
                    found.add(target.id)
    return found


def marked(node: ast.AST) -> str:
    """The name in `allocates(name)`, by which a function is marked that another makes; "" for anything else."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "allocates" and isinstance(node.args[0], ast.Name):
        return node.args[0].id
    return ""


def unkept(source: str) -> list[str]:
    """ "function: array" for every array of a kernel's own whose address is taken and that is not kept to the end."""
    found = []
    tree = ast.parse(source)
    allocating = {name for node in ast.walk(tree) if (name := marked(node))}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        if "allocates" not in map(ast.unparse, function.decorator_list) and function.name not in allocating:
            continue
        text = ast.unparse(function)
        last = [ast.unparse(line) for line in function.body]
        found += [
            f"{function.name}: {name}"
            for name in sorted(owned(function))
            if f"{name}.ctypes.data" in text and f"keep({name})" not in last
        ]
    return found


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_kernels_keep_what_they_take_the_address_of(path: Path) -> None:
    assert not unkept(path.read_text(encoding="utf-8"))
