"""asyncengine: an LLM inference engine that lives inside your Python program."""

from importlib import import_module
from typing import Any

__version__ = "0.3.0"


def _public_names() -> dict[str, str]:
    """Public names, each with the module that defines it, as `__init__.pyi` has them for type checkers."""
    with open(f"{__path__[0]}/__init__.pyi", encoding="utf-8") as file:
        words = [line.split() for line in file if line.startswith("from asyncengine.")]
    return {name: module.removeprefix("asyncengine.") for _, module, _, name, *_ in words}


_MODULES = _public_names()
"""A module is imported when it, or a name of it, is first asked for: importing the package loads next to nothing."""
__all__ = [*_MODULES]  # noqa: PLE0604  # names all


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in {"grammar", *_MODULES.values()}:
        return import_module(f"asyncengine.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module 'asyncengine' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"asyncengine.{_MODULES[name]}"), name)
    return value
