"""Random logits, random budgets, a real tokenizer: every output that ends is valid JSON of its schema.

    PYTHONPATH=tests python -m tests.grammar.torture --size 151650 --seeds 20

The tests run a slice of it.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from jsonschema import Draft202012Validator
from support.big_tokenizers import LARGE, SMALL, big_tokenizer
from support.grammar_walks import text_of, walk

from asyncengine.errors import GrammarError
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlgTemplate, LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from asyncengine.grammar.vocabulary import Vocabulary

from .corpus import Case, compilable
from .schema_check import Checker

MOST = 160
"""Tokens a budget may exceed the least one by."""


@dataclass
class Tally:
    walks: int = 0
    steered: int = 0
    tokens: int = 0
    lost: list[str] = field(default_factory=list)
    """Schemas that llguidance compiles and that were refused here."""
    wrong: list[str] = field(default_factory=list)


def real_vocabulary(size: int) -> Vocabulary:
    found = big_tokenizer(size)
    return Vocabulary(found.token_bytes, found.eos_ids, found.special_ids, size, found.encode)


def torture(vocabulary: Vocabulary, cases: Sequence[Case], seeds: Sequence[int]) -> Tally:
    backend, tally = LlguidanceBackend(vocabulary), Tally()
    for case in cases:
        try:
            template = backend.compile(Grammar.json_schema(case.schema))
        except GrammarError as error:
            tally.lost.append(f"{case.name}: {error}")
            continue
        for seed in seeds:
            fault = one(vocabulary, template, case, seed, tally)
            if fault is not None:
                tally.wrong.append(f"{case.name}, seed {seed}: {fault}")
    return tally


def one(vocabulary: Vocabulary, template: LlgTemplate, case: Case, seed: int, tally: Tally) -> str | None:
    """The fault of one walk's output, if it has one."""
    rng = random.Random(f"{case.name} {seed}")
    budget = template.min_tokens + int(rng.expovariate(4 / MOST))
    matcher = Matcher(template, budget, "close")
    tokens, _ = walk(vocabulary, matcher, budget, rng, jump=bool(seed % 2))
    tally.walks += 1
    tally.steered += matcher.steered_from is not None
    tally.tokens += len(tokens)
    if len(tokens) > budget:
        return f"{len(tokens)} tokens, budget {budget}"
    return fault_of(text_of(vocabulary, tokens), case)


def fault_of(text: str, case: Case) -> str | None:
    """Keys that are not declared may come twice (see `corpus.known`): then the plain parser's last one counts."""
    fault = Checker(case.schema).text_fault(text)
    if fault is not None and "twice" in fault:
        error = next(Draft202012Validator(case.schema).iter_errors(json.loads(text)), None)
        fault = None if error is None else error.message
    return None if fault is None else f"{fault}: {text[:300]}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, choices=(SMALL, LARGE), default=SMALL)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    tally = torture(real_vocabulary(options.size), compilable(), range(options.first, options.first + options.seeds))
    for line in [*tally.lost, *tally.wrong]:
        print(line)
    print(
        f"{tally.walks} walks over {len(compilable())} schemas, {tally.tokens} tokens, {tally.steered} cut short by "
        f"their budget; {len(tally.lost)} schemas lost, {len(tally.wrong)} outputs wrong; "
        f"{time.perf_counter() - began:.0f} s"
    )
    return bool(tally.lost or tally.wrong)


if __name__ == "__main__":
    sys.exit(main())
