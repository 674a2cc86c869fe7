"""Bugs that are planted to see whether a fuzz notices them."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import pytest

from asyncengine.errors import EngineError

FOUND = (AssertionError, EngineError, ValueError, LookupError, StopIteration)
"""Errors that a check of the books, of the fake device or of answers raises, or that a wrong number leads to."""


class Bug(NamedTuple):
    """A few lines of the package that are written otherwise, as `planted_bugs.toml` has them."""

    name: str
    seldom: bool
    """The short form of the random lives does not meet it."""
    long: bool
    """It is looked for in the long form of the tests alone."""
    change: str

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Let the functions that it changes run the changed code, wherever they are used already."""
        sources: dict[ModuleType, str] = {}
        path = ""
        for hunk in re.split(r"^@@", self.change, flags=re.MULTILINE):
            first, *lines = hunk.splitlines()
            path = first.strip() or path
            module = importlib.import_module("asyncengine." + path.removesuffix(".py").replace("/", "."))
            source = sources.setdefault(module, inspect.getsource(module))
            before, after = ("".join(f"{each[1:]}\n" for each in lines if each[0] in kinds) for kinds in (" -", " +"))
            assert source.count(f"\n{before}") == 1, f"{self.name}: {path} has not once the lines\n{before}"
            sources[module] = source.replace(f"\n{before}", f"\n{after}")
        for module, source in sources.items():
            old, new = (
                dict(_functions(compile(text, str(module.__file__), "exec")))
                for text in (inspect.getsource(module), source)
            )
            changed = {name for name in new if _meaning(new[name]) != _meaning(old[name])}
            for function in _functions_of(module):
                if function.__qualname__ in changed:
                    patch.setattr(function, "__code__", new[function.__qualname__])
                    changed.remove(function.__qualname__)
            assert not changed, f"{self.name}: nobody calls {changed}"


def live(make: Callable[[int], Any], seeds: Iterable[int]) -> None:
    """Live the lives that `make` makes of `seeds`, until one of them raises."""
    for seed in seeds:
        make(seed).run()


def bugs(kind: str) -> list[Bug]:
    """The bugs of `planted_bugs.toml` that this kind of lives must find."""
    tables = tomllib.loads(Path(__file__).with_name("planted_bugs.toml").read_text(encoding="utf-8"))["bug"]
    return [
        Bug(each["name"], each.get("seldom", False), each.get("long", False), each["change"])
        for each in tables
        if kind in each["in"]
    ]


def _functions(code: CodeType) -> Iterator[tuple[str, CodeType]]:
    """The code of a module's functions and methods by their qualified names, without those within functions."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & inspect.CO_OPTIMIZED:
                yield each.co_qualname, each
            else:  # the body of a class
                yield from _functions(each)


def _meaning(code: CodeType) -> object:
    """All that the code does, whatever its lines are."""
    constants = [_meaning(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return code.co_code, constants, code.co_names, code.co_varnames


def _functions_of(module: ModuleType) -> Iterator[FunctionType]:
    classes = [each for each in vars(module).values() if isinstance(each, type) and each.__module__ == module.__name__]
    for each in (value for space in (module, *classes) for value in vars(space).values()):
        function = each.fget if isinstance(each, property) else each
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            yield function
