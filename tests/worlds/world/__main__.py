"""The command line of the lives in a simulated world: in `tests`, `python -m worlds.world --seeds 1000`."""

from __future__ import annotations

import argparse
import sys

from worlds.world.plan import make_plan
from worlds.world.search import Total, explore, live


def main(arguments: list[str] | None = None) -> int:
    """Live lives; 1 if one goes wrong."""
    parser = argparse.ArgumentParser(prog="python -m worlds.world", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="the number of lives")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first")
    parser.add_argument("--seed", type=int, help="live this one alone, again")
    parser.add_argument("--order", type=int, default=0, help="the order of events in it")
    parser.add_argument("--calls", type=_numbers, help="only these of its calls")
    parser.add_argument("--faults", type=_numbers, help="only these of its faults")
    given = parser.parse_args(arguments)
    if given.seed is None:
        try:
            total = explore(range(given.first, given.first + given.seeds), _tell)
        except AssertionError as error:
            print(error)
            return 1
        print(_in_words(total))
        return 0
    plan = make_plan(given.seed)
    calls = {call.number for call in plan.calls} - set(given.calls or ()) if given.calls is not None else ()
    faults = set(range(len(plan.faults))) - set(given.faults) if given.faults is not None else ()
    plan = plan.without(calls, faults)
    finding = live(plan, given.order)
    print(plan)
    print("all went right" if finding is None else finding)
    return finding is not None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _tell(total: Total) -> None:
    if total.lives % 100 == 0:
        print(_in_words(total), file=sys.stderr)


def _in_words(total: Total) -> str:
    hours, seconds = total.virtual_seconds / 3600, total.cpu_seconds
    return f"{total.lives} lives, {total.calls} calls, {hours:.1f} hours in {seconds:.0f} s of CPU: all went right"


if __name__ == "__main__":
    raise SystemExit(main())
