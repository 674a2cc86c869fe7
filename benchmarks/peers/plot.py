"""The same as a picture: how many times each peer's figure this engine's is."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.peers.results import Results
from benchmarks.peers.workloads import Figure


def draw(
    path: str, results: Results, figures: Sequence[tuple[str, Figure]], systems: dict[str, str], base: str, title: str
) -> None:
    """Bars of each system's rate as a share of this engine's; of times, the inverse. `systems`: name to title.

    Raises `ImportError` without matplotlib.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [(key, figure) for key, figure in figures if results.median(key, base) is not None]
    names = [name for name in systems if any(results.median(key, name) is not None for key, _ in shown)]
    height = 0.8 / max(1, len(names))
    figure_, axes = pyplot.subplots(figsize=(10, 0.6 + 0.17 * len(names) * len(shown)), layout="constrained")
    for place, name in enumerate(names):
        ratios = [results.advantage(key, name, base, figure.lower_is_better) for key, figure in shown]
        bars = [(row, 1 / ratio) for row, ratio in enumerate(ratios) if ratio]
        axes.barh([row + place * height for row, _ in bars], [bar for _, bar in bars], height, label=systems[name])
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([row + 0.4 for row in range(len(shown))], [figure.title for _, figure in shown])
    axes.invert_yaxis()
    axes.set_xlabel("as good as this engine = 1; longer is better")
    axes.set_title(title)
    axes.legend(loc="lower right", fontsize="small")
    figure_.savefig(path, dpi=150)
    pyplot.close(figure_)
