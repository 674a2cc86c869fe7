"""Schemas people wrote, and JSON Schema's own tests: which are taken, which texts each takes, and what compiling costs.

    python -m benchmarks.suites.schema_corpora [--maskbench FOLDER] [--test-suite FOLDER] [--share 10 --size 32k]
        [--key-order schema any] [--library]

--maskbench: maskbench/data of guidance-ai/jsonschemabench. --test-suite: tests/draft2020-12 of
json-schema-org/JSON-Schema-Test-Suite. --share: one schema of so many, in the order of their names, which begin with
where they are from. A schema passes if it compiles, all its valid instances are taken as `json.dumps` writes them, and
none of its invalid ones is. An invalid instance that is taken is checked by `jsonschema` as well; exits with 1 if that
calls one invalid, too. --key-order: of objects, one table for each; --library: llguidance's own compiler beside it, in
the same process. Each instance is also followed token by token, with a mask before each: microseconds of CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import llguidance
import numpy as np

from asyncengine.errors import EngineError, GrammarError, GrammarUnsupported
from asyncengine.grammar import Grammar, check_limits
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.lower import FLEXIBLE
from asyncengine.grammar.vocabulary import Vocabulary
from benchmarks.grammar_setup import WIDTHS, library_matcher, spread, vocabulary

PASSED, NOT_TAKEN, TOO_MUCH = "passed", "a valid instance is not taken", "an invalid instance is taken"


_LIBRARY = Grammar.json_object()
_BYTES = llguidance.LLTokenizer("byte")


class Case(NamedTuple):
    """A schema with instances and whether each is valid."""

    name: str
    schema: Any
    instances: list[tuple[Any, bool]]


def maskbench(folder: Path, share: int) -> list[Case]:
    found = []
    for path in sorted(folder.glob("*.json"))[::share]:
        file = json.loads(path.read_text(encoding="utf-8"))
        found.append(Case(path.stem, file["schema"], [(test["data"], test["valid"]) for test in file["tests"]]))
    return found


def test_suite(folder: Path) -> list[Case]:
    return [
        Case(f"{path.stem}: {group['description']}", group["schema"], [(t["data"], t["valid"]) for t in group["tests"]])
        for path in sorted(folder.glob("*.json"))
        for group in json.loads(path.read_text(encoding="utf-8"))
    ]


def is_valid(schema: Any, instance: Any) -> bool:
    """Verdict of `jsonschema` on an instance; True where it cannot read the schema."""
    from jsonschema.validators import Draft202012Validator, validator_for

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        return bool(kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(instance))
    except Exception:
        return True


class Runner:
    """Compiles cases with one backend and keeps the seconds that each took."""

    def __init__(self, made: Vocabulary, key_order: str, follow: bool = True) -> None:
        """`key_order`: as in `Grammar`, or "library" for llguidance's own compiler."""
        self.backend = LlguidanceBackend(made)
        self._key_order = key_order
        self._follow = follow
        self.seconds: list[float] = []
        self.masks: list[float] = []
        self.steps: list[float] = []
        self.accepted: list[str] = []
        """Invalid instances that were taken and that `jsonschema` calls invalid."""

    def outcome(self, case: Case) -> str:
        began = time.process_time()
        try:
            made, matcher = self._compiled(case.schema)
        except GrammarUnsupported as error:
            return "refused: " + ", ".join(sorted({keyword for keyword, _ in error.features}))
        except EngineError as error:
            return f"refused: {type(error).__name__}"
        finally:
            self.seconds.append(time.process_time() - began)
        result = PASSED
        for instance, valid in case.instances:
            text = json.dumps(instance, ensure_ascii=False)
            data = list(text.encode("utf-8", "replace"))
            matcher.reset()
            taken = matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()
            if taken and not valid:
                result = TOO_MUCH
                if not is_valid(case.schema, instance):
                    self.accepted.append(f"{case.name}: {json.dumps(instance)[:200]}")
            elif valid and not taken and result == PASSED:
                result = NOT_TAKEN
            if taken and self._follow:
                self._walk(made, text)
        return result

    def _compiled(self, schema: Any) -> tuple[Any, Any]:
        """Makes something with `fill` and `consume`, and a matcher over bytes."""
        if self._key_order == "library":
            if isinstance(schema, bool):
                raise GrammarError("grammar", "the library takes no whitespace for a Boolean schema")
            text = llguidance.LLMatcher.grammar_from_json_schema(
                json.dumps(schema), overrides={"whitespace_pattern": FLEXIBLE}
            )
            made = library_matcher(_LIBRARY, text, self.backend.vocabulary.ll_tokenizer)
            return made, library_matcher(_LIBRARY, text, _BYTES)
        grammar = Grammar.json_schema(schema, key_order=self._key_order)  # type: ignore[arg-type]
        check_limits(grammar)
        template = self.backend.compile(grammar)
        return template, library_matcher(grammar, template.text, _BYTES)

    def _walk(self, made: Any, text: str) -> None:
        """Measure masks and steps along a text; a step of ours includes the way to the end."""
        vocabulary = self.backend.vocabulary
        tokens = vocabulary.tokenize(text)
        mask = np.zeros(vocabulary.mask_words, dtype=np.int32)
        library = self._key_order == "library"
        matcher = made.deep_copy() if library else made.new_state().matcher
        closing = None if library else made.new_closing()
        for place, token in enumerate(tokens):
            began = time.thread_time()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            masked = time.thread_time()
            taken = matcher.try_consume_tokens([token])
            if closing is not None and taken:
                closing.advance(token, len(tokens) + 4096 - place)
            self.masks.append(masked - began)
            self.steps.append(time.thread_time() - masked)
            if not taken:
                return


def report(title: str, cases: list[Case], runner: Runner, names: bool) -> None:
    outcomes = {case.name: runner.outcome(case) for case in cases}
    count = Counter(outcomes.values())
    print(f"{title}: {count[PASSED]} of {len(cases)} pass ({100 * count[PASSED] / max(1, len(cases)):.1f} %)")
    for outcome, times in count.most_common():
        print(f"  {times:>6}  {outcome}")
    row = spread(runner.seconds, 1e3)
    print("  compile, ms of CPU: " + ", ".join(f"{key} {row[key]:.1f}" for key in ("p50", "mean", "p99", "max")))
    for what, seconds in (("mask", runner.masks), ("accept", runner.steps)):
        if seconds:
            row = spread(seconds, 1e6)
            print(f"  {what}, us: " + ", ".join(f"{key} {row[key]:.1f}" for key in ("mean", "p50", "p99", "max")))
    if names:
        print(*(f"  {name}\t{outcome}" for name, outcome in outcomes.items() if outcome != PASSED), sep="\n")


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--maskbench", type=Path, metavar="FOLDER")
    parser.add_argument("--test-suite", type=Path, metavar="FOLDER")
    parser.add_argument("--share", type=int, default=10)
    parser.add_argument("--size", choices=WIDTHS, default="32k")
    parser.add_argument("--key-order", nargs="+", choices=("schema", "any"), default=["schema"])
    parser.add_argument("--library", action="store_true")
    parser.add_argument("--names", action="store_true", help="of all that did not pass")
    options = parser.parse_args(None if arguments is None else list(arguments))
    accepted = []
    made = vocabulary(options.size)
    made.warm_up()
    gc.freeze()  # as engines do once they have loaded
    for title, cases in (
        ("MaskBench", maskbench(options.maskbench, options.share) if options.maskbench else []),
        ("JSON-Schema-Test-Suite", test_suite(options.test_suite) if options.test_suite else []),
    ):
        for order in (*options.key_order, *(["library"] if options.library else [])) if cases else ():
            runner = Runner(made, order)
            report(f"{title}, keys: {order}", cases, runner, options.names)
            runner.backend.close()
            accepted += runner.accepted
    print(f"{len(accepted)} invalid instances taken", *accepted, sep="\n  ")
    return 1 if accepted else 0


if __name__ == "__main__":
    sys.exit(main())
