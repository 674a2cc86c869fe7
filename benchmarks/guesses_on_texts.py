"""Guesses on real text: the bundled model, and the same made larger, through LangChain; see `speculation.py`.

Tasks of the kinds that the model was trained for, on texts that training never drew: quote, extract as JSON (free, and
under a grammar), answer from a passage; and stories, which repeat nothing of their prompts. The model cannot edit a
text by an instruction. What comes nearest is a record that it extracts again, in the same conversation, from a text in
which a word was changed, with its record of before as the prediction (conversations that it gets right). One stream;
times count from an answer's first part to its end, and (whole) from the request on, its prompt being in the prefix
cache. What was learnt is forgotten before each round, so that nobody has written an answer before; answers to the other
tasks of the round are looked up in. Every answer is compared with that of the run without guesses.

With --wide the model is made as large as Qwen3-0.6B without its vocabulary, by weights that are zero: it says the same,
and a step reads 700 MB, as a larger model's does; so what guesses save is not hidden behind the work for each token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from asyncengine import Engine, EngineHandle, shared_engine
from asyncengine.config import EngineConfig
from asyncengine.demo import MODEL_PATH
from asyncengine.integrations.langchain import ChatAsyncEngine
from asyncengine.speculation import DraftPlanner
from asyncengine.speculation.acceptance import NOTHING, Draft
from makers.demo_model.conversations import make

COUNT, LEAST = 12, 30
"""Tasks of a kind, and characters that a right answer has at least: of less there is nothing to be timed."""
KINDS = {"quote": "chat", "extract": "extract", "passage": "passage"}
"""Kinds of answers that are timed, and the skill of the bundled model that it is."""
NEW_WORDS = ("Marbo", "Pelintor", "Dovas", "Quessel", "Harnim", "Tolbeck")

ALONE = "by the draft model alone"
ANIMALS = ("fox", "dog", "owl", "bear", "goat", "cat", "crow", "wolf", "hen", "duck", "frog", "mouse")

Messages = list[tuple[str, str]]


class Seconds(NamedTuple):
    """Times of an answer, or of several."""

    decoding: float
    """From the first part to the end."""
    whole: float
    """From the request on."""


@dataclass(frozen=True, slots=True)
class Task:
    """A conversation up to what is to be answered."""

    text: Messages
    before: str = ""
    """Record of an edit that was right before the change."""
    wanted: str = ""
    """The right record of an edit."""
    schema: dict[str, Any] | None = None
    """Schema of an answer under a grammar."""


def tasks() -> dict[str, list[Task]]:
    """Conversations that training never drew."""
    found = {"story": [Task([("user", f"Tell me a story about a {animal}.")]) for animal in ANIMALS]}
    for kind, skill in KINDS.items():
        chosen: list[Task] = []
        for seed in range(2000):
            made = make(skill, seed, held_out=True)
            answer, asked = made.messages[-1].get("content") or "", str(made.messages[-2]["content"])
            if len(answer) >= LEAST and not made.tools and (kind != "quote" or answer in asked):
                chosen.append(Task(said(made.messages[:-1]), schema=schema_of(answer) if kind == "extract" else None))
            if len(chosen) == COUNT:
                break
        found[kind] = chosen
    found["extract, grammar"] = found["extract"]
    found["extract"] = [replace(task, schema=None) for task in found["extract"]]
    found["edit"] = edits()
    return found


def said(messages: Sequence[Any]) -> Messages:
    return [(message["role"], str(message["content"])) for message in messages]


def schema_of(record: str) -> dict[str, Any]:
    """One that `record` follows."""
    names = {str: "string", int: "integer", bool: "boolean", type(None): "null", float: "number"}
    fields = {
        key: {"type": "array", "items": {"type": "string"}} if isinstance(value, list) else {"type": names[type(value)]}
        for key, value in json.loads(record).items()
    }
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def edits() -> list[Task]:
    """More than are needed: not all of them are answered rightly."""
    rng, found = random.Random(5), []
    for seed in range(100_000, 104_000):
        made = make("extract", seed, held_out=True)
        text = said(made.messages)
        record, asked = text[-1][1], text[-2][1]
        values = json.loads(record).values()
        fields = [one for one in values if isinstance(one, str) and len(one) > 2 and asked.count(one) == 1]
        if len([role for role, _ in text if role == "user"]) != 1 or not fields or len(record) < 2 * LEAST:
            continue
        old, new = rng.choice(fields), rng.choice(NEW_WORDS)
        new = new.lower() if old[0].islower() else new
        wanted = record.replace(json.dumps(old, ensure_ascii=False), json.dumps(new))
        found.append(Task([*text, ("user", asked.replace(old, new))], record, wanted))
        if len(found) == 4 * COUNT:
            break
    return found


def wider(folder: Path) -> str:
    """The bundled model with zeros around its weights: 28 layers of width 1024. It says the same."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL_PATH, folder)
    config = json.loads((folder / "config.json").read_text())
    own = load_file(folder / "model.safetensors")
    layers, width = config["num_hidden_layers"], config["hidden_size"]
    config |= {
        "num_hidden_layers": 28, "hidden_size": 4 * width, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_key_value_heads": 8, "rms_norm_eps": config["rms_norm_eps"] / 4,
    }  # fmt: skip
    heads = {"q_proj": 16 * config["head_dim"], "k_proj": 8 * config["head_dim"], "v_proj": 8 * config["head_dim"]}
    sizes = {**heads, "o_proj": 4 * width, "gate_proj": 3072, "up_proj": 3072, "down_proj": 4 * width}
    inputs = {"o_proj": 16 * config["head_dim"], "down_proj": 3072}
    weights = {}
    for number in range(28):
        for name in [name for name in own if name.startswith(f"model.layers.{number % layers}.")]:
            part = name.split(".")[-2]
            found = own[name] * (number < layers or part not in ("o_proj", "down_proj"))
            shape = (4 * width,) if found.dim() == 1 else (sizes[part], inputs.get(part, 4 * width))
            weights[name.replace(f".{number % layers}.", f".{number}.", 1)] = padded(found, shape)
    for name in [name for name in own if ".layers." not in name]:
        weights[name] = padded(own[name], (*own[name].shape[:-1], 4 * width))
    # the mean of squares is a fourth of what it was: a half restores the root exactly
    weights = {name: found / 2 if found.dim() == 1 else found for name, found in weights.items()}
    (folder / "config.json").write_text(json.dumps(config))
    assert all(found.dtype is torch.bfloat16 for found in weights.values())
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def padded(found: Any, shape: Sequence[int]) -> Any:
    """`found` in the first places, zeros in the others."""
    made = found.new_zeros(shape)
    made[tuple(slice(size) for size in found.shape)] = found
    return made.contiguous()


async def timed(chat: ChatAsyncEngine, task: Task, **options: Any) -> tuple[Seconds, str]:
    """Seconds that the answer took, and the answer."""
    asked, began, parts = time.perf_counter(), 0.0, []
    if task.schema is not None:
        named = {"name": "record", "schema": task.schema}
        options["response_format"] = {"type": "json_schema", "json_schema": named}
    async for part in chat.astream(task.text, **options):
        began = began or time.perf_counter()
        parts.append(part.text)
    ended = time.perf_counter()
    return Seconds(ended - began, ended - asked), "".join(parts)


async def answered(chat: ChatAsyncEngine, chosen: Sequence[Task]) -> tuple[list[Task], list[str]]:
    """Up to `COUNT` of the tasks, and what is answered; of edits those whose answer is right."""
    found = [(task, (await timed(chat, task))[1]) for task in chosen]
    kept = [pair for pair in found if pair[0].wanted in ("", pair[1])][:COUNT]
    return [task for task, _ in kept], [answer for _, answer in kept]


def nearly(text: str, share: float, rng: random.Random) -> str:
    """`text` with so many of its words right."""
    return " ".join(word if rng.random() < share else word[::-1] for word in text.split(" "))


class Nothing:
    """Finds nothing."""

    def propose(self, tokens: Sequence[int], limit: int) -> Draft:
        return NOTHING


def planner_of(engine: Engine) -> DraftPlanner:
    planner = engine.aengine.core.loop.scheduler.roster.drafts
    assert planner is not None, engine.info.no_speculation
    return planner


def said_costs(config: EngineConfig) -> None:
    """Print what steps take."""
    assert config.speculation_costs is not None
    assert config.draft_costs is not None
    for name, costs in (("the model's", config.speculation_costs), ("the draft model's", config.draft_costs)):
        print(f"  {name} steps of 1, 8 and 32 tokens, us:", [round(cost * 1e6) for cost in costs])


async def compare(model: str, options: argparse.Namespace) -> None:
    """Print the medians of the ratios, without guesses over with."""
    shared: dict[str, Any] = {
        "num_threads": options.threads, "show_progress": False, "quantization": options.quantization,
    }  # fmt: skip
    configs = {
        "off": {"speculation": "off"}, "looked up": {}, "with a prediction, 90 % right": {"speculation_memory": 1},
        "looked up or by the draft model": {"draft_model": "demo/draft"},
        ALONE: {"draft_model": "demo/draft", "speculation_memory": 1},
    }  # fmt: skip
    if options.draft:
        configs = {name: config for name, config in configs.items() if name == "off" or "draft_model" in config}
    handles: list[EngineHandle] = []
    chats: dict[str, ChatAsyncEngine] = {}
    for name, settings in configs.items():
        config = {**shared, **settings}
        handles.append(shared_engine(model, **config))
        handles[-1].get()
        chats[name] = ChatAsyncEngine(model=model, engine_config=config, temperature=0, max_tokens=options.tokens)
    engines = dict(zip(configs, [handle.get() for handle in handles], strict=True))
    planner_of(engines[ALONE]).make = lambda *_: Nothing()
    said_costs(engines[ALONE].aengine.core.config)
    rng = random.Random(1)
    for kind, chosen in tasks().items():
        if options.kinds and kind not in options.kinds:
            continue
        texts, answers = await answered(chats["off"], chosen)
        guesses = [task.before or nearly(answer, 0.9, rng) for task, answer in zip(texts, answers, strict=True)]

        async def run(name: str, texts: Any = texts, answers: Any = answers, guesses: Any = guesses) -> Seconds:
            if name != "off":
                planner_of(engines[name]).clear()
            took = []
            for task, answer, guess in zip(texts, answers, guesses, strict=True):
                given = {"prediction": guess} if "prediction" in name else {}
                seconds, found = await timed(chats[name], task, **given)
                assert found == answer, "speculation was seen"
                took.append(seconds)
            return Seconds(*map(sum, zip(*took, strict=True)))

        for name in configs:
            await run(name)  # prompts into the prefix cache
        ratios: dict[str, list[Seconds]] = {name: [] for name in configs if name != "off"}
        for turn in range(options.rounds):
            seconds = {name: await run(name) for name in list(configs)[:: 1 if turn % 2 else -1]}
            for name, found in ratios.items():
                found.append(Seconds(*(off / on for off, on in zip(seconds["off"], seconds[name], strict=True))))
        said = "; ".join(
            f"{name} {_summary([one.decoding for one in found])}, whole {_summary([one.whole for one in found])}"
            for name, found in ratios.items()
        )
        print(f"{kind:16} {sum(map(len, answers)) // len(answers)} characters: {said}", flush=True)
    for name, handle in zip(configs, handles, strict=True):
        stats = handle.get().stats()
        print(f"  {name}: {stats.tokens_per_pass:.2f} tokens a pass; {stats.speculation}")
        handle.get().close()
        handle.close()


def _summary(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def on_texts(options: argparse.Namespace, folder: Path) -> None:
    print("the bundled model" + options.wide * ", as large as Qwen3-0.6B")
    asyncio.run(compare(wider(folder / "wider") if options.wide else "demo", options))
