"""Guesses on real text: the bundled model, and the same made deeper, through LangChain; see `speculation.py`.

Tasks of the kinds that the model was trained for, on texts that training never drew: quote, extract as JSON, answer
from a passage; and stories, which repeat nothing of their prompts. One stream; times count from an answer's first token
to its last. With layers that add nothing (their outputs are zero) the model says the same and takes as long as a larger
one, whose every step reads more memory: what guesses save there is not hidden behind the host's work for each token.
Every answer is compared with that of the run without guesses.
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
from pathlib import Path
from typing import Any

from asyncengine import EngineHandle, shared_engine
from asyncengine.demo import MODEL_PATH
from asyncengine.integrations.langchain import ChatAsyncEngine
from tools.demo_model.conversations import make

COUNT, LEAST = 6, 30
"""Tasks of a kind, and characters that a right answer has at least: of less there is nothing to be timed."""
KINDS = {"quote": "chat", "extract": "extract", "passage": "passage"}
"""What is timed, and the skill of the bundled model that it is."""

Messages = list[tuple[str, str]]


def tasks() -> dict[str, list[Messages]]:
    """Conversations that training never drew, up to what is to be answered."""
    found: dict[str, list[Messages]] = {"story": [[("user", f"Tell me a story about a {animal}.")] for animal in
                                                  ("fox", "dog", "owl", "bear", "goat", "cat")]}  # fmt: skip
    for kind, skill in KINDS.items():
        chosen: list[Messages] = []
        for seed in range(2000):
            made = make(skill, seed, held_out=True)
            answer, asked = made.messages[-1].get("content") or "", str(made.messages[-2]["content"])
            if len(answer) >= LEAST and not made.tools and (kind != "quote" or answer in asked):
                chosen.append([(message["role"], str(message["content"])) for message in made.messages[:-1]])
            if len(chosen) == COUNT:
                break
        found[kind] = chosen
    return found


def deeper(folder: Path, layers: int) -> str:
    """The bundled model with so many layers more."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL_PATH, folder)
    config = json.loads((folder / "config.json").read_text())
    weights = load_file(folder / "model.safetensors")
    own = config["num_hidden_layers"]
    for number in range(layers):
        for name in [name for name in weights if name.startswith(f"model.layers.{number % own}.")]:
            new = name.replace(f"layers.{number % own}.", f"layers.{own + number}.", 1)
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            weights[new] = weights[name] * 0 if adds else weights[name].clone()
    config["num_hidden_layers"] = own + layers
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


async def timed(chat: ChatAsyncEngine, text: Messages, **options: Any) -> tuple[float, str]:
    """Seconds from the first part of the answer to its end, and the answer."""
    began, parts = 0.0, []
    async for part in chat.astream(text, **options):
        began = began or time.perf_counter()
        parts.append(part.text)
    return time.perf_counter() - began, "".join(parts)


def nearly(text: str, share: float, rng: random.Random) -> str:
    """`text` with so many of its words right."""
    return " ".join(word if rng.random() < share else word[::-1] for word in text.split(" "))


async def compare(model: str, options: argparse.Namespace) -> None:
    """Print the medians of the ratios, without guesses over with."""
    shared: dict[str, Any] = {"num_threads": options.threads, "show_progress": False}
    configs = {
        "off": {"speculation": "off"}, "looked up in its own text": {"speculation_memory": 1},
        "with a prediction, 90 % right": {"speculation_memory": 2},
        "looked up or by the draft model": {"speculation_memory": 1, "draft_model": "demo/draft"},
    }  # fmt: skip
    handles: list[EngineHandle] = []
    chats: dict[str, ChatAsyncEngine] = {}
    for name, settings in configs.items():
        config = {**shared, **settings}
        handles.append(shared_engine(model, **config))
        handles[-1].get()
        chats[name] = ChatAsyncEngine(model=model, engine_config=config, temperature=0, max_tokens=options.tokens)
    rng = random.Random(1)
    for kind, texts in tasks().items():
        answers = [(await timed(chats["off"], text))[1] for text in texts]
        guesses = [nearly(answer, 0.9, rng) for answer in answers]
        ratios: dict[str, list[float]] = {name: [] for name in configs if name != "off"}
        for turn in range(options.rounds):
            seconds: dict[str, float] = {}
            for name in list(configs)[:: 1 if turn % 2 else -1]:
                seconds[name] = 0.0
                for text, answer, guess in zip(texts, answers, guesses, strict=True):
                    given = {"prediction": guess} if "prediction" in name else {}
                    took, found = await timed(chats[name], text, **given)
                    assert found == answer, "speculation was seen"
                    seconds[name] += took
            for name, found_ratios in ratios.items():
                found_ratios.append(seconds["off"] / seconds[name])
        said = "; ".join(f"{name} {_summary(found)}" for name, found in ratios.items())
        print(f"{kind:8} {sum(map(len, answers)) // len(answers)} characters: {said}", flush=True)
    for name, handle in zip(configs, handles, strict=True):
        stats = handle.get().stats()
        print(f"  {name}: {stats.tokens_per_pass:.2f} tokens a pass; {stats.speculation}")
        handle.get().close()
        handle.close()


def _summary(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def on_texts(options: argparse.Namespace, folder: Path) -> None:
    print("the bundled model")
    asyncio.run(compare("demo", options))
    if options.layers:
        print(f"the same with {options.layers} layers more")
        asyncio.run(compare(deeper(folder / "deeper", options.layers), options))
