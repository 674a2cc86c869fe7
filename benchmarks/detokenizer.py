"""Microseconds per token of incremental detokenization and stop matching, one token per push.

    python -m benchmarks.detokenizer [path of a model ...]

Measures the tiny tokenizers of the tests, then each tokenizer given. "table" is the time to build the token table.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from text.tokenizer_zoo import KINDS, LINES

from asyncengine.config import EngineConfig
from asyncengine.text.stop_strings import StopAutomaton, StopStringMatcher
from asyncengine.text.token_table import TokenTable
from asyncengine.text.tokenizer import load_tokenizer

TEXTS = {"ascii": LINES[0], "mixed": "".join(LINES[:6])}
STOPS = ("\n\nUser:", "</s>", "Observation:", "```")


def best(work: Callable[[], object], tokens: int, rounds: int = 7) -> float:
    """Microseconds per token of the fastest round: the others met other load."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times) / tokens * 1e6


def measure(tokenizer: Any) -> tuple[str, float, dict[str, float]]:
    begin = time.perf_counter()
    table = TokenTable(tokenizer)
    built = time.perf_counter() - begin
    stops = StopAutomaton(STOPS)
    result = {}
    for name, text in TEXTS.items():
        encoded = tokenizer.encode(text)
        ids = list(getattr(encoded, "ids", encoded))
        ids = ids * (2000 // len(ids) + 1)

        def stream(ids: list[int] = ids) -> None:
            detokenizer = table.stream()
            for token in ids:
                detokenizer.push((token,))
            detokenizer.finish()

        def match(ids: list[int] = ids) -> None:
            detokenizer, matcher = table.stream(), StopStringMatcher(stops)
            for token in ids:
                matcher.push(detokenizer.push((token,)))

        result[name] = best(stream, len(ids))
        result[name + " + stops"] = best(match, len(ids))
    return table.mode, built, result


def main() -> None:
    tokenizers = {name: build for name, (_, build) in KINDS.items()}
    for path in sys.argv[1:]:
        loaded = load_tokenizer(path, EngineConfig())
        if loaded is None:
            sys.exit(f"no tokenizer in {path}")
        tokenizers[path] = lambda loaded=loaded: loaded.hf
    columns = [column for name in TEXTS for column in (name, name + " + stops")]
    print(f"{'us per token':22}{'plan':8}{'table s':>9}" + "".join(f"{column:>15}" for column in columns))
    for name, build in tokenizers.items():
        mode, built, result = measure(build())
        print(f"{name:22}{mode:8}{built:9.3f}" + "".join(f"{result[column]:15.2f}" for column in columns))


if __name__ == "__main__":
    main()
