"""Models come and go, nodes fail and return: what a strategy places, refuses and loses.

An instance that a failed node takes with it is placed anew at once; one that fits nowhere waits, and is tried again
whenever memory becomes free. Every strategy meets the same events (`events`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from asyncengine.checks import as_choice
from asyncengine.integrations.placement.nodes import Claim
from asyncengine.integrations.placement.placement import Placement, Refusal, place
from asyncengine.integrations.placement.scores import STRATEGIES
from asyncengine.integrations.placement.table import Cluster
from benchmarks.cluster.events import Event, Plan, make_events, make_nodes
from benchmarks.cluster.plots import new_figure, require_matplotlib, save

_SAMPLES = 400
"""Points of a plot."""


@dataclass(slots=True)
class Outcome:
    """Outcome of one strategy. Shares are of all time and memory."""

    strategy: str
    arrived: int = 0
    placed_at_once: int = 0
    placed_later: int = 0
    never: int = 0
    """Left before there was room for them, or were waiting at the end."""
    lost: int = 0
    """Times that an instance was lost with a node."""
    recovered: int = 0
    """Instances of these that were placed anew at once."""
    recovered_later: int = 0
    abandoned: int = 0
    """Left before they were placed anew, or were waiting at the end."""
    stages: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    """Reasons, by nodes, of all refusals."""
    waited: float = 0.0
    """Hours, of those placed later, on average."""
    used: float = 0.0
    """Share of device memory that is claimed (of host memory, where nodes have no devices), over time."""
    busiest: float = 0.0
    """The same of the fullest node, on average over time."""
    milliseconds: tuple[float, float] = (0.0, 0.0)
    """Time of one placement: median and 99th percentile."""
    history: list[tuple[float, float, int]] = field(default_factory=list)
    """(hour, share of memory used, instances waiting)"""


class _Waiting(NamedTuple):
    """An instance that fits nowhere now."""

    name: str
    since: float
    lost: bool
    """It ran before, on a node that failed."""


class Simulation:
    """One strategy's life of a cluster."""

    def __init__(self, plan: Plan, strategy: str) -> None:
        """Raises `InvalidParameter`."""
        as_choice("strategy", strategy, STRATEGIES)
        self.plan, self.strategy = plan, strategy
        self.nodes = {node.name: node for node in make_nodes(plan)}
        self.table = Cluster(self.nodes.values())
        self.outcome = Outcome(strategy)
        self._claims: dict[str, Claim] = {}
        """Claims of all instances that should run."""
        self._waiting: deque[_Waiting] = deque()
        self._times: list[float] = []
        self._hours = self._used = self._busiest = self._waited = 0.0

    def run(self) -> Outcome:
        for event in make_events(self.plan):
            self._pass_time(event.at)
            self._apply(event)
        self._pass_time(self.plan.hours)
        return self._finish()

    def _apply(self, event: Event) -> None:
        if event.kind == "arrive":
            assert event.claim is not None
            self.outcome.arrived += 1
            self._claims[event.name] = event.claim
            if self._place(event.name):
                self.outcome.placed_at_once += 1
            else:
                self._waiting.append(_Waiting(event.name, event.at, lost=False))
            return
        if event.kind == "leave":
            del self._claims[event.name]
            if event.name in self.table.instances:
                self.table.stop(event.name)
        elif event.kind == "fail":
            for instance in self.table.remove(event.name):
                self.outcome.lost += 1
                if self._place(instance.name):
                    self.outcome.recovered += 1
                else:
                    self._waiting.append(_Waiting(instance.name, event.at, lost=True))
        else:
            self.table.add(self.nodes[event.name])
        self._try_waiting(event.at)

    def _try_waiting(self, now: float) -> None:
        """In their order; who left meanwhile is forgotten. A claim that is as large as one refused just now is not
        tried."""
        smallest: float = float("inf")
        still: deque[_Waiting] = deque()
        for each in self._waiting:
            claim = self._claims.get(each.name)
            if claim is None:
                self._give_up(each)
                continue
            size = claim.device_bytes or claim.cpu_bytes or 0
            if size >= smallest or not self._place(each.name):
                smallest = min(smallest, size)
                still.append(each)
            elif each.lost:
                self.outcome.recovered_later += 1
            else:
                self.outcome.placed_later += 1
                self._waited += now - each.since
        self._waiting = still

    def _give_up(self, waiting: _Waiting) -> None:
        if waiting.lost:
            self.outcome.abandoned += 1
        else:
            self.outcome.never += 1

    def _place(self, name: str) -> bool:
        begin = time.perf_counter()
        found = place(self._claims[name], self.table, strategy=self.strategy)
        self._times.append(time.perf_counter() - begin)
        if isinstance(found, Refusal):
            self.outcome.refused.update({reason.what: reason.nodes for reason in found.reasons})
            return False
        assert isinstance(found, Placement)
        self.outcome.stages[found.stage] += 1
        self.table.start(found.instance(name, state="running"))
        return True

    def _pass_time(self, now: float) -> None:
        used, busiest = self._use()
        step, history = now - self._hours, self.outcome.history
        self._used += step * used
        self._busiest += step * busiest
        if not history or now - history[-1][0] >= self.plan.hours / _SAMPLES:
            history.append((now, used, len(self._waiting)))
        self._hours = now

    def _use(self) -> tuple[float, float]:
        """Shares of memory that are claimed: of all, of the fullest node. Of failed nodes nothing is."""
        table = self.table
        if self.plan.devices:
            taken, room = table.used.sum(axis=1), table.limit.sum(axis=1)
        else:
            taken, room = table.host_used, table.host_limit
        if not room.any():
            return 0.0, 0.0
        there = room > 0
        return float(taken.sum() / room.sum()), float((taken[there] / room[there]).max())

    def _finish(self) -> Outcome:
        outcome, times = self.outcome, sorted(self._times)
        for each in self._waiting:
            self._give_up(each)
        outcome.used, outcome.busiest = self._used / self.plan.hours, self._busiest / self.plan.hours
        outcome.waited = self._waited / max(outcome.placed_later, 1)
        if times:
            outcome.milliseconds = (1e3 * times[len(times) // 2], 1e3 * times[int(len(times) * 0.99)])
        return outcome


# ---------------------------------------------------------------- the command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = Plan()
    for each in fields(Plan):
        value = getattr(defaults, each.name)
        flag = "--" + each.name.replace("_", "-")
        parser.add_argument(
            flag, type=type(value), default=value, metavar=type(value).__name__.upper(), help=f"[{value}]"
        )
    parser.add_argument(
        "--strategy", action="append", metavar="NAME", help="spread or binpack (repeat the flag) [both]"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw them (needs the extra: bench)")


def run(args: argparse.Namespace) -> int:
    if args.plot is not None:
        require_matplotlib()
    plan = Plan(**{each.name: getattr(args, each.name) for each in fields(Plan)})
    outcomes = [Simulation(plan, strategy).run() for strategy in args.strategy or STRATEGIES]
    if args.json:
        print(json.dumps({"plan": asdict(plan), "results": [_as_dict(each) for each in outcomes]}))
    else:
        print("\n".join(table(outcomes)))
    if args.plot is not None:
        _draw(args.plot, plan, outcomes)
    return 0


def table(outcomes: list[Outcome]) -> list[str]:
    """Outcomes as lines of markdown."""
    names = ["strategy", "arrived", "at once", "later (h)", "never", "lost / recovered at once + later", "memory used",
             "fullest node", "ms p50 / p99"]  # fmt: skip
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for each in outcomes:
        cells = [
            each.strategy, str(each.arrived), str(each.placed_at_once), f"{each.placed_later} ({each.waited:.1f})",
            str(each.never), f"{each.lost} / {each.recovered} + {each.recovered_later}", f"{each.used:.1%}",
            f"{each.busiest:.1%}", "{:.2f} / {:.2f}".format(*each.milliseconds),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _as_dict(outcome: Outcome) -> dict[str, Any]:
    figures = {each.name: getattr(outcome, each.name) for each in fields(Outcome) if each.name != "history"}
    return {**figures, "stages": dict(outcome.stages), "refused": dict(outcome.refused)}


def _draw(path: Path, plan: Plan, outcomes: list[Outcome]) -> None:
    figure, ((used, waiting),) = new_figure(1, 2)
    for each in outcomes:
        hours = [hour for hour, _, _ in each.history]
        used.plot(hours, [share for _, share, _ in each.history], label=each.strategy)
        waiting.plot(hours, [count for _, _, count in each.history], label=each.strategy)
    used.set(title="share of memory claimed", xlabel="hours", ylim=(0, 1))
    waiting.set(title="instances waiting", xlabel="hours", ylim=(0, None))
    for axes in (used, waiting):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(f"{plan.nodes} nodes of {plan.devices} devices, {plan.arrivals:g} arrivals an hour")
    save(figure, path)
