"""Drawing what was simulated, where matplotlib is installed."""

from __future__ import annotations

from typing import Any

from asyncengine.errors import EngineError


class PlotError(EngineError):
    """A plot cannot be drawn: matplotlib is missing, or the file cannot be written."""


def require_matplotlib() -> None:
    """Before the simulation, not after it. Raises `PlotError` naming the extra."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise PlotError('--plot needs matplotlib: pip install "asyncengine[bench]"') from error


def new_figure(rows: int, columns: int) -> tuple[Any, Any]:
    """(figure, its axes), drawn without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (5 * columns, 3.6 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    return figure, axes


def save(figure: Any, path: Any) -> None:
    """Raises `PlotError`."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlotError(f"plot: {error}") from error
