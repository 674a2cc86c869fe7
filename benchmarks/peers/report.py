"""The report: one table of figures, one of shares of the machine's best, what is absent, and the same as a file."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from benchmarks.peers import table
from benchmarks.peers.roofline import least_alike, least_decode, least_prefill
from benchmarks.peers.run import Run
from benchmarks.peers.systems import ENGINE, System
from benchmarks.peers.workloads import Figure, Workload

_MEMORY = [
    ("memory peak", Figure("peak", "peak memory, loading and 32 requests at once", "MiB", lower_is_better=True)),
    ("memory share", Figure("share", "that over weights + KV pool", "times", lower_is_better=True)),
]
CAPTION = (
    "Medians over repetitions. (x): how many times better this engine is, the median of the ratios within each"
    " repetition. *: measured once. -: not measured."
)


def figures(chosen: Sequence[Workload]) -> list[tuple[str, Figure]]:
    found = [(f"{workload.name} {figure.key}", figure) for workload in chosen for figure in workload.figures]
    return found + _MEMORY


def shown(run: Run) -> list[System]:
    return [system for system in run.systems if system.name not in run.absent]


def base(run: Run) -> str:
    """The system that the others are compared with: this engine in the first form asked for."""
    return next(system.name for system in run.systems if system.name.startswith(ENGINE.name))


def shares(run: Run, chosen: Sequence[Workload]) -> list[list[str]]:
    """Least time by the machine's best over the time taken, in per cent, of the workloads for which it is simple."""
    lines = []
    for workload in chosen:
        cells = [_share(run, workload, system) for system in shown(run)]
        if any(cells):
            lines.append([workload.figures[0].title, *(cell or "-" for cell in cells)])
    return lines


def _share(run: Run, workload: Workload, system: System) -> str:
    key = f"{workload.name} {workload.figures[0].key}"
    bandwidth, rate = (run.results.median(f"machine {name}", workload.name) for name in ("bandwidth", "rate"))
    value = run.results.median(key, system.name)
    weights = run.facts.get(system.name, {}).get("weights")
    if value is None or bandwidth is None or rate is None or weights is None:
        return ""
    dtype = run.settings.dtype
    requests = workload.make(run.shape.vocab, 0)
    if workload.alone:
        context = len(requests[0].prompt) + requests[0].output / 2
        least, took = least_decode(run.shape, dtype, weights, context, bandwidth), 1 / value
    elif workload.name == "prefill":
        length = len(requests[0].prompt)
        least, took = least_prefill(run.shape, [length], rate), length / value
    elif workload.name.startswith("conc-"):
        least = least_alike(run.shape, dtype, weights, requests, bandwidth, rate)
        took = sum(request.output for request in requests) / value
    else:
        return ""
    return f"{100 * least / took:.0f} %"


def agreement(run: Run) -> list[str]:
    """Share of first tokens that are this engine's: do all compute the same model? Near ties may round either way."""
    mine = run.firsts.get(base(run))
    if not mine:
        return []
    cells = []
    for system in shown(run):
        theirs = run.firsts.get(system.name)
        same = sum(left == right for left, right in zip(mine, theirs or [], strict=False))
        cells.append(f"{100 * same / len(mine):.0f} %" if theirs else "-")
    return ["same first token as this engine", *cells]


def machine(run: Run, chosen: Sequence[Workload]) -> str:
    found = []
    for name, unit in (("bandwidth", "GB/s read"), ("rate", f"GFLOP/s of {run.settings.dtype} products")):
        values = [run.results.median(f"machine {name}", workload.name) for workload in chosen]
        known = [value / 1e9 for value in values if value is not None]
        if known:
            found.append(f"{min(known):.0f} .. {max(known):.0f} {unit}")
    company = [run.results.largest(f"company {workload.name}") for workload in chosen]
    if worst := max((value for value in company if value is not None), default=None):
        found.append(f"others took at most {worst:.1f} cores during a turn")
    weights = 2 if run.settings.dtype == "bfloat16" else 4
    cache = run.shape.kv_bytes(run.settings.dtype)
    size = f"weights {run.shape.parameters * weights / 1e9:.2f} GB, {cache} B of KV a token"
    work = f"{run.shape.operations(1, 1, 1) / 1e9:.2f} GFLOP a token"
    return f"{', '.join(found)}, {run.settings.threads} threads; {run.shape.name}: {size}, {work}"


def _heads(run: Run, first: str) -> list[str]:
    return [first, *(system.title for system in shown(run))]


def _tables(run: Run, chosen: Sequence[Workload]) -> list[tuple[str, list[str], list[list[str]], str]]:
    names = [system.name for system in shown(run)]
    title = f"{run.shape.name}, {run.weights}, {run.settings.dtype}, {run.settings.threads} threads, greedy"
    lines = table.rows(run.results, figures(chosen), names, base(run))
    found = [(title, _heads(run, "work"), lines, CAPTION)]
    least = shares(run, chosen)
    same = agreement(run)
    if least or same:
        found.append(
            (
                "share of the machine's best",
                _heads(run, "work"),
                [*least, *([same] if same else [])],
                machine(run, chosen),
            )
        )
    return found


def versions(run: Run) -> list[str]:
    said = [
        f"{system.title}: {run.facts[system.name].get('version', '')} {run.facts[system.name].get('note', '')}".rstrip()
        for system in shown(run)
        if system.name in run.facts
    ]
    titles = {system.name: system.title for system in run.systems}
    return said + table.absent({titles[name]: reason for name, reason in run.absent.items()})


def show(run: Run, chosen: Sequence[Workload], console: Console) -> None:
    for title, heads, lines, caption in _tables(run, chosen):
        table.show(console, title, heads, lines, caption)
    for line in versions(run):
        console.print(line, markup=False)


def as_markdown(run: Run, chosen: Sequence[Workload]) -> str:
    parts = [
        f"{title}\n\n{table.markdown(heads, lines)}\n\n{caption}"
        for title, heads, lines, caption in _tables(run, chosen)
    ]
    return "\n\n".join([*parts, "\n".join(f"- {line}" for line in versions(run))]) + "\n"


def plot(run: Run, chosen: Sequence[Workload], path: str) -> None:
    from benchmarks.peers import plot as drawing
    from benchmarks.peers.run import say

    titles = {system.name: system.title for system in shown(run)}
    try:
        drawing.draw(path, run.results, figures(chosen), titles, base(run), f"{run.shape.name}, {run.settings.dtype}")
    except ImportError:
        say("no plot: matplotlib is not installed")
