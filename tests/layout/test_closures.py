"""The price of understanding a part: the lines of all modules that it imports, one by way of another.

The numbers are ceilings. What only type checkers see does not count; imports inside functions do.
"""

from __future__ import annotations

import pytest
from layout.test_layout import names_in, runtime, sources

MODULES = dict(sources())
LINES = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
CLOSURES = {"kvcache.kv_cache": 3_400, "scheduler": 8_200, "engine.loop": 12_000, "grammar.service": 4_400}
"""Module -> lines of it and of all that it imports, at most."""
OTHER_UNITS = ("execution", "kernels", "grammar", "lora", "integrations", "assembly")
MAX_CORE = 22_500
"""Lines of all that is neither another unit nor assembly, at most."""
MAX_PACKAGE = 92_000


def closure(module: str) -> set[str]:
    """The module and all that it imports, but for the package itself, which precedes all."""
    found = todo = {module}
    while todo:
        names = {name for each in todo for name in names_in(runtime(MODULES[each]))}
        todo = (names & MODULES.keys()) - found - {"asyncengine"}
        found = found | todo
    return found


@pytest.mark.parametrize("module", CLOSURES)
def test_a_part_can_be_read(module: str) -> None:
    lines = sum(LINES[each] for each in closure(f"asyncengine.{module}"))
    assert 0.9 * CLOSURES[module] <= lines <= CLOSURES[module]


def test_core_is_small_and_knows_no_torch() -> None:
    aliases = ("serve", "training", "cli", "cluster", "__main__")
    own = [module for module in MODULES if module.split(".")[0] == "asyncengine"]  # not langchain_asyncengine's like
    core = [module for module in own if [*module.split("."), ""][1] not in (*OTHER_UNITS, *aliases)]
    assert sum(LINES[module] for module in core) <= MAX_CORE
    torch = [
        f"{module} imports {name}"
        for module in core
        for name in names_in(runtime(MODULES[module]))
        if name.split(".")[0] in ("torch", "triton", "numba")
    ]
    assert not torch


def test_the_package_has_a_size() -> None:
    assert sum(LINES.values()) <= MAX_PACKAGE
