"""Labelled yes/no questions about held-out passages, for `asyncengine calibrate`:

python -m makers.demo_model.decisions > cases.jsonl && asyncengine calibrate demo --cases cases.jsonl --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from typing import Any

from makers.demo_model import facts as f
from makers.demo_model.entities import ENTITIES
from makers.demo_model.reading import gather, write
from makers.demo_model.words import Words

ASKED = [(entity, field) for entity in dict.fromkeys(ENTITIES) for field in entity.fields if field.kind == "boolean"]
"""What the model has learned to answer with yes or no."""


def cases(count: int, others: int, opposite: bool = False) -> Iterator[dict[str, Any]]:
    """`count` cases, among about `others` facts of other things each. `opposite`: the passage says the opposite of
    another thing of the same kind."""
    for number in range(count):
        w = Words(random.Random(f"decide/{number}"), True)
        entity, field = ASKED[number % len(ASKED)]
        fact = f.Fact(str(entity.subject(w)), field, field.draw(w), entity)
        groups = gather(w, others)
        if opposite:
            groups.append([f.Fact(str(entity.subject(w)), field, not fact.value, entity)])
        about = [fact, *(f.Fact(fact.subject, each, each.draw(w), entity) for each in w.rng.sample(entity.fields, 1))]
        groups.insert(w.rng.randint(0, len(groups)), about if about[1].field is not field else [fact])
        question = {"type": "noul", "instructions": f.upper(fact.question(w))}
        yield {"state": " ".join(write(w, groups)), "question": question, "answer": bool(fact.value)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--others", type=int, default=6, help="facts of other things in each passage [6]")
    parser.add_argument("--opposite", action="store_true", help="one of them says the opposite of a thing of that kind")
    args = parser.parse_args()
    for case in cases(args.count, args.others, args.opposite):
        print(json.dumps(case))


if __name__ == "__main__":
    main()
