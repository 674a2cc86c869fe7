"""The names that the other units take of kernels, as `api.pyi` lists them for type checkers.

Each module behind them is imported when its name is first asked for: numba and Triton are slow to import and not
everywhere (`compiler_missing`, `triton_missing`), and `CompileAhead` is wanted before torch is there. Modules stand for
groups of functions that are used together.
"""

from pathlib import Path
from typing import Any

_LINES = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines()
_HOMES = {name: module for line in _LINES if line.startswith("from ") for _, module, _, name, *_ in [line.split()]}
"""The module of each name: "from MODULE import NAME as NAME"."""
__all__ = [*_HOMES]  # noqa: PLE0604  # names all


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = __import__(_HOMES[name], fromlist=[name])
    attribute = globals()[name] = getattr(module, name)  # steps import names anew: later imports find this one
    return attribute
