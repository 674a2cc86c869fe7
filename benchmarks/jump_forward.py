"""Decoding steps that tokens forced by a grammar save (jump-forward).

    python -m benchmarks.jump_forward [--sizes 32k 151k --model demo --streams 8 --rounds 3 --json]

Teacher-forced: over the valid samples of `constraints.py`, tokens that had to be sampled against tokens that followed
by force, with real tokenizers, for each whitespace option and the ways of writing JSON that it allows. A step is one
sampled token; without jump-forward every token is one, and an end of sequence where the grammar does not end by itself.
"typical" and "large" are the groups the targets are set for.

End to end: the real engine twice, with jump_forward on and off, on the same schemas and prompts, greedy, turn by turn:
`stats().steps`, output tokens and wall seconds, alone and with several streams. Texts may differ between the two
where the model would have cut a forced text into other tokens, so steps are also given per 1,000 characters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from asyncengine import AsyncEngine, SamplingParams
from asyncengine.errors import EngineError
from asyncengine.grammar import Grammar
from asyncengine.grammar.llguidance_backend import LlguidanceBackend
from asyncengine.grammar.matcher import Matcher
from benchmarks.constraints import CONSTRAINTS, Constraint, record
from benchmarks.grammar_setup import WIDTHS, grammar_of, laid_out, vocabulary

GROUPS = {
    "typical": ("json_small", "json_medium", "json_recursive", "tools10", "json_formats"),
    "large": ("json_large",),
}
TARGETS = {"typical": 0.12, "large": 0.25}
MAX_TOKENS = {"typical": 256, "large": 1024}
"""Longest outputs of the end-to-end runs: a small model may write numbers without end."""
STYLES = (("flexible", "spaced"), ("flexible", "indented"), ("flexible", "compact"), ("single_space", "spaced"))
STYLES = (*STYLES, ("compact", "compact"))
ENOUGH = 1 << 20
PROMPT = "Name: Ada Lovelace, born 1815 in London, mathematician, ada@example.org. Answer with JSON.\n"
BY_NAME = {constraint.name: constraint for constraint in CONSTRAINTS}


# ---------------------------------------------------------------- teacher-forced


def count(backend: LlguidanceBackend, constraint: Constraint, whitespace: str, layout: str) -> dict[str, int]:
    """Over all samples: `tokens`, of them `forced`, `ends` sampled, `beginning` (forced before the first sampled one,
    which the engine samples all the same), and `recut`: forced tokens other than the tokenizer's."""
    template = backend.compile(grammar_of(constraint, whitespace=whitespace))
    total = dict.fromkeys(("tokens", "forced", "ends", "beginning", "recut"), 0)
    for text in laid_out(constraint, layout):
        state = template.new_state()
        total["beginning"] += len(state.forced())
        matcher = Matcher(template, ENOUGH, "truncate")
        done, left = b"", text.encode()
        tokens = backend.vocabulary.tokenize(text)
        while tokens:
            taken = matcher.accept(tokens[0])
            spelled = b"".join(backend.vocabulary.token_bytes[token] for token in taken)
            assert left.startswith(spelled), (constraint.name, spelled, left)
            total["tokens"] += len(taken)
            total["forced"] += len(taken) - 1
            done, left = done + spelled, left[len(spelled) :]
            if taken == tokens[: len(taken)]:
                tokens = tokens[len(taken) :]
            else:
                total["recut"] += 1
                tokens = backend.vocabulary.tokenize(left.decode())
        total["ends"] += not matcher.is_terminated()
    return total


def saved(total: dict[str, int]) -> float:
    return total["forced"] / (total["tokens"] + total["ends"])


def teacher_forced(size: str) -> dict[str, Any]:
    backend = LlguidanceBackend(vocabulary(size))
    report: dict[str, Any] = {}
    for whitespace, layout in STYLES:
        counts = {
            name: count(backend, BY_NAME[name], whitespace, layout) for names in GROUPS.values() for name in names
        }
        shares = {name: saved(total) for name, total in counts.items()}
        groups = {}
        for group, names in GROUPS.items():
            together = {key: sum(counts[name][key] for name in names) for key in counts[names[0]]}
            groups[group] = saved(together)
        report[f"{whitespace}, written {layout}"] = {
            "saved": shares,
            "groups": groups,
            "recut": sum(total["recut"] for total in counts.values()),
            "beginning": {name: total["beginning"] for name, total in counts.items()},
        }
    return report


# ---------------------------------------------------------------- end to end


def wide(fields: int) -> dict[str, Any]:
    """A flat record of short values with telling names, as extraction schemas have them."""
    kinds: tuple[dict[str, Any], ...] = (
        {"type": "integer", "minimum": 0, "maximum": 9999},
        {"type": "boolean"},
        {"type": "string", "maxLength": 24},
        {"enum": ["low", "medium", "high"]},
        {"type": "string", "format": "date"},
    )
    names = ("department", "quantity_ordered", "delivery_address", "priority_level", "effective_date")
    return record({f"{names[i % 5]}_{i}": kinds[(i * 2) % 5] for i in range(fields)})


def schemas() -> dict[str, list[dict[str, Any]]]:
    typical = [BY_NAME[name].value for name in GROUPS["typical"]]
    return {"typical": typical, "large": [BY_NAME["json_large"].value, wide(40), wide(60)]}


async def ask(engine: AsyncEngine, group: list[Grammar], streams: int, most: int) -> dict[str, float]:
    """Each schema by `streams` requests at once, schemas in turn; totals."""
    before = engine.stats()
    began = time.perf_counter()
    texts: list[str] = []
    for grammar in group:
        params = SamplingParams(grammar=grammar, max_tokens=most, temperature=0.0)
        done = await asyncio.gather(*(engine.generate(f"{index}. {PROMPT}", params) for index in range(streams)))
        texts += [completion.text for completion in done]
    seconds = time.perf_counter() - began
    after = engine.stats()
    return {
        "steps": after.steps - before.steps,
        "tokens": after.generated_tokens - before.generated_tokens,
        "characters": sum(map(len, texts)),
        "seconds": seconds,
        "texts": texts,  # type: ignore[dict-item]
    }


async def accepted(engine: AsyncEngine, grammars: list[Grammar], most: int) -> tuple[list[Grammar], list[str]]:
    """Grammars that the engine takes, and its errors for the others."""
    taken, refused = [], []
    for grammar in grammars:
        try:
            await engine.generate(PROMPT, SamplingParams(grammar=grammar, max_tokens=most, temperature=0.0))
            taken.append(grammar)
        except EngineError as error:
            refused.append(f"{grammar.text[:60]}...: {error}")
    return taken, refused


async def end_to_end(model: str, streams: int, rounds: int, whitespace: str) -> dict[str, Any]:
    settings = {"kv_cache_memory": "512MB", "prefix_caching": False, "show_progress": False}
    on = await AsyncEngine.from_pretrained(model, jump_forward=True, **settings)  # type: ignore[arg-type]
    off = await AsyncEngine.from_pretrained(model, jump_forward=False, **settings)  # type: ignore[arg-type]
    report: dict[str, Any] = {}
    async with on, off:
        for name, group in schemas().items():
            most = MAX_TOKENS[name]
            constraints = [Constraint(name, "json_schema", schema, ()) for schema in group]
            grammars, refused = await accepted(
                on, [grammar_of(one, whitespace=whitespace) for one in constraints], most
            )
            for engine in (on, off):
                await ask(engine, grammars, streams, most)  # compiles, and warms kernels of these shapes
            for number in (1, streams):
                runs: dict[str, list[dict[str, float]]] = {"on": [], "off": []}
                for turn in range(rounds):
                    for key, engine in (("on", on), ("off", off))[:: 1 if turn % 2 else -1]:
                        runs[key].append(await ask(engine, grammars, number, most))
                report[f"{name}, {number} at once"] = {**compared(runs), "refused": refused}
    return report


def compared(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, each in runs.items():
        middle = {name: statistics.median(run[name] for run in each) for name in each[0] if name != "texts"}
        middle["steps_per_1000_characters"] = 1000 * middle["steps"] / middle["characters"]
        found[key] = middle
    on, off = found["on"], found["off"]
    pairs = list(zip(runs["on"][0]["texts"], runs["off"][0]["texts"], strict=True))
    found["same_texts"] = sum(left == right for left, right in pairs) / len(pairs)
    found["steps_saved"] = 1 - on["steps_per_1000_characters"] / off["steps_per_1000_characters"]
    found["seconds_saved"] = 1 - on["seconds"] / on["characters"] * off["characters"] / off["seconds"]
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="*", choices=WIDTHS, default=list(WIDTHS))
    parser.add_argument("--model", default="demo", help='"none": teacher-forced only')
    parser.add_argument("--whitespace", nargs="+", default=["flexible", "compact"], help="of the end-to-end runs")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def table(report: dict[str, Any]) -> str:
    names = [name for group in GROUPS.values() for name in group]
    lines = []
    for size, styles in report["teacher_forced"].items():
        lines.append(f"{size}: share of steps saved")
        lines.append(f"  {'':<31}" + "".join(f"{name:>15}" for name in (*names, *GROUPS)) + f"{'recut':>7}")
        for style, row in styles.items():
            cells = [row["saved"][name] for name in names] + [row["groups"][group] for group in GROUPS]
            lines.append(f"  {style:<31}" + "".join(f"{cell:>15.1%}" for cell in cells) + f"{row['recut']:>7}")
    lines.append("targets: " + ", ".join(f"{group} {share:.0%}" for group, share in TARGETS.items()))
    for whitespace, found in report["end_to_end"].items():
        lines.append(f"end to end, {whitespace}: on / off")
        for name, row in found.items():
            on, off = row["on"], row["off"]
            lines.append(
                f"  {name:<22} steps {on['steps']:.0f} / {off['steps']:.0f}, tokens {on['tokens']:.0f} / "
                f"{off['tokens']:.0f}, seconds {on['seconds']:.2f} / {off['seconds']:.2f}; for as many characters: "
                f"{row['steps_saved']:.1%} of the steps saved, {row['seconds_saved']:.1%} of the time; "
                f"{row['same_texts']:.0%} same texts"
            )
            lines += [f"    refused: {text}" for text in row["refused"]]
    return "\n".join(lines)


def main() -> None:
    options = parse()
    report: dict[str, Any] = {"teacher_forced": {size: teacher_forced(size) for size in options.sizes}}
    report["end_to_end"] = {
        whitespace: asyncio.run(end_to_end(options.model, options.streams, options.rounds, whitespace))
        for whitespace in (options.whitespace if options.model != "none" else ())
    }
    print(json.dumps(report) if options.json else table(report))


if __name__ == "__main__":
    main()
