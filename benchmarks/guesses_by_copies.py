"""What look-ups gain by a table of costs, and what they could gain at most: python -m benchmarks.guesses_by_copies

    [--costs 609 911 1523 2786 5484 --tasks 60 --most 15]

The bundled model answers tasks of the kinds of `guesses_on_texts`, once. Then no clock: its answers are given again,
one stream, guessed for by the planner as it is, and steps take what the table says (1, 4, 8, 16 and 32 tokens).
Beside that, the most that copying could gain: of who knows the answer, and copies from prompt, output and the kind's
earlier answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from asyncengine import Engine, SamplingParams
from asyncengine.request_spec import RequestSpec
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.costs import StepCosts
from asyncengine.speculation.planner import Candidate
from benchmarks import guesses_on_texts
from benchmarks.guesses_on_texts import planner_of, tasks

NAMESPACE: tuple[Hashable, ...] = ("texts",)


class Answer(NamedTuple):
    spec: RequestSpec
    output: list[int]


def answers(kinds: Sequence[str], tokens: int) -> dict[str, list[Answer]]:
    """By kind, as the bundled model gives them."""
    params, found = SamplingParams(temperature=0.0, max_tokens=tokens), dict[str, list[Answer]]()
    with Engine.from_pretrained("demo", show_progress=False) as engine:
        planner: Any = planner_of(engine)
        specs: list[RequestSpec] = []
        make, forget = planner._make, planner.forget

        def made(spec: RequestSpec, *others: Any) -> Any:
            specs.append(spec)
            return make(spec, *others)

        def forgotten(key: int, namespace: tuple[Hashable, ...], output: Sequence[int]) -> Any:
            if specs:
                found[kind].append(Answer(specs.pop(), list(output)))
            return forget(key, namespace, output)

        planner._make, planner.forget = made, forgotten
        for kind, chosen in tasks().items():
            if kind not in kinds:
                continue
            found[kind] = []
            for task in chosen:
                engine.chat([{"role": role, "content": text} for role, text in task.text], params=params)
    return found


def gain(texts: Sequence[Answer], costs: StepCosts, most: int) -> tuple[float, float, float]:
    """Time without guesses over time with them, tokens a pass, and the share of guesses that stood."""
    planner, time = DraftPlanner(costs, most, 2**24), 0.0
    plain = passes = drafted = right = 0
    for key, (spec, output) in enumerate(texts):
        whole = [*spec.prompt, *output]
        live = whole[: len(spec.prompt) + 1]
        while len(live) < len(whole):
            room = spec.max_total - len(live) - 1
            draft = planner.plan([Candidate(key, spec, live, NAMESPACE, room)], 1, 1).get(key, ())
            rest = whole[len(live) : len(live) + len(draft) + 1]
            stood = next((place for place, token in enumerate(draft) if rest[place : place + 1] != [token]), len(draft))
            live += rest[: stood + 1]
            plain, passes, time = plain + len(rest[: stood + 1]), passes + 1, time + costs.of(1 + len(draft))
            drafted, right = drafted + len(draft), right + stood
            if draft:
                planner.learn(key, len(draft), stood)
        planner.forget(key, NAMESPACE, output)
    return plain / time, plain / passes, right / max(1, drafted)


def bound(texts: Sequence[Answer], costs: StepCosts, most: int) -> float:
    """The gain of who copies as much as is right, or as pays."""
    plain, time, earlier = 0, 0.0, list[list[int]]()
    for spec, output in texts:
        end = len(output)
        least = [0.0] * (end + 1)
        for place in range(end - 1, 0, -1):
            own = [*spec.prompt, *output[:place]]
            copied = longest(output[place : place + most], [own, *earlier])
            least[place] = min(costs.of(1 + count) + least[min(end, place + count + 1)] for count in range(copied + 1))
        plain, time = plain + end - 1, time + least[1]
        earlier.append(output)
    return plain / time


def longest(wanted: Sequence[int], texts: Sequence[Sequence[int]]) -> int:
    """How many of `wanted` stand somewhere, one behind the other."""
    best = 0
    for text in texts:
        for place, token in enumerate(text):
            if token == wanted[0]:
                pairs = list(zip(wanted, text[place : place + len(wanted)], strict=False))
                best = max(best, next((count for count, (one, other) in enumerate(pairs) if one != other), len(pairs)))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--costs", type=float, nargs=5, default=[609.0, 911.0, 1523.0, 2786.0, 5484.0])
    parser.add_argument("--kinds", nargs="+", default=["quote", "extract", "passage", "edit", "story"])
    parser.add_argument("--tasks", type=int, default=60)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--most", type=int, default=15)
    options = parser.parse_args()
    guesses_on_texts.COUNT = options.tasks
    costs = StepCosts(options.costs)
    for kind, texts in answers(options.kinds, options.tokens).items():
        gained, tokens, stood = gain(texts, costs, options.most)
        most = bound(texts, costs, options.most)
        print(
            f"{kind:8} {len(texts)} answers: {gained:.2f} of {most:.2f}, {tokens:.2f} tokens a pass, "
            f"{stood:.0%} of guesses stood",
            flush=True,
        )


if __name__ == "__main__":
    main()
