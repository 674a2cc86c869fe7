"""Names that programs written for 0.2 use: none of them goes, but for those that the changelog says are gone.

`public_names_0_2.txt` was written by `python tests/layout/test_public_names.py` in a checkout of 0.2.0.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("public_names_0_2.txt")
MODULES = (
    "asyncengine",
    "asyncengine.cluster",
    "asyncengine.testing",
    "langchain_asyncengine",
    "llama_index.llms.asyncengine",
    "llama_index.embeddings.asyncengine",
    "llama_index.postprocessor.asyncengine",
)
GONE = {
    # reproducing another program's quirks is no longer part of the product
    "asyncengine.cluster.place(parity)",
    "asyncengine.cluster.rank_for_removal(parity)",
}


def parameters(function: Any) -> list[str]:
    try:
        return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    except ValueError:  # of a class written in C
        return []


def names_of(path: str, thing: Any) -> Iterator[str]:
    """A public thing's path, and those of its fields, methods and their parameters: "a.Class.method(parameter)"."""
    yield path
    if not inspect.isclass(thing):
        if inspect.isroutine(thing):
            yield from (f"{path}({name})" for name in parameters(thing))
        return
    if dataclasses.is_dataclass(thing):
        yield from (f"{path}.{field.name}" for field in dataclasses.fields(thing))
    if not issubclass(thing, BaseException):
        yield from (f"{path}({name})" for name in parameters(thing))
    for name in {**getattr(thing, "__annotations__", {}), **dict.fromkeys(getattr(thing, "_fields", ()))}:
        if not name.startswith("_"):
            yield f"{path}.{name}"
    for owner in thing.__mro__:
        if "asyncengine" not in owner.__module__:
            continue
        for name, member in vars(owner).items():
            if name.startswith("_"):
                continue
            yield f"{path}.{name}"
            if inspect.isroutine(member):
                yield from (f"{path}.{name}({each})" for each in parameters(getattr(thing, name)))


def public_names() -> set[str]:
    found: set[str] = set()
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            found.update(names_of(f"{module.__name__}.{name}", getattr(module, name)))
    return found


def test_names_of_the_last_release_are_there() -> None:
    recorded = set(RECORDED.read_text(encoding="utf-8").split())
    assert recorded - public_names() == GONE


if __name__ == "__main__":
    RECORDED.write_text("\n".join(sorted(public_names())) + "\n", encoding="utf-8")
