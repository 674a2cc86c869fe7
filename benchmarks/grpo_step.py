"""Time of a GRPO step on the demo model, with the engine and with transformers' `generate`, side by side:

    python -m benchmarks.grpo_step [--steps 5] [--prompts 4] [--generations 8] [--tokens 128] [--json FILE]

Two trainers of TRL with the same arguments, data and seed take turns, step by step, so that both have the same company
on a shared machine. Beside wall time it has the process's CPU time, which company distorts less. No completion ends
early, so both make the same number of tokens. The first step of each warms up and is left out. Needs asyncengine[trl].
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from asyncengine import DEMO_MODEL, Engine
from asyncengine.integrations.trl import attach

WAYS = ("engine", "transformers")


def trainer_of(way: str, flags: argparse.Namespace, folder: str, engine: Engine) -> Any:
    """A trainer that does not learn for real: what counts is how long it takes."""
    animals = ("cat", "dog", "cow", "fox", "hen", "duck", "mouse", "horse")
    asked = [f"Tell me a story about a {animal} named Tim." for animal in animals]
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in asked]})
    least: dict[str, Any] = {"min_tokens": flags.tokens} if way == "engine" else {"min_new_tokens": flags.tokens}
    args = GRPOConfig(
        output_dir=folder, max_steps=flags.steps + 1, per_device_train_batch_size=flags.prompts * flags.generations,
        num_generations=flags.generations, max_completion_length=flags.tokens, learning_rate=1e-6, logging_steps=1,
        use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
        generation_kwargs=least,
    )  # fmt: skip

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert all(len(ids) == flags.tokens for ids in completion_ids)
        return [float(len(set(ids))) for ids in completion_ids]

    trainer = GRPOTrainer(model=str(DEMO_MODEL), reward_funcs=reward, args=args, train_dataset=data)
    if way == "engine":
        attach(trainer, engine)
    return trainer


def timed(call: Callable[[], Any], into: list[tuple[float, float]]) -> Any:
    """The result of `call`; its wall time and CPU time are appended to `into`."""
    wall, cpu = time.perf_counter(), time.process_time()
    made = call()
    into.append((time.perf_counter() - wall, time.process_time() - cpu))
    return made


def measure(flags: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Median seconds of each way: a whole step, and sampling alone (with pushing weights)."""
    whole: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    sampling: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, Engine.from_pretrained("demo", dtype="float32") as engine:
        trainers = {way: trainer_of(way, flags, folder, engine) for way in WAYS}
        for way, trainer in trainers.items():
            turn = trainer._generate_single_turn
            trainer._generate_single_turn = lambda *given, turn=turn, way=way, **more: timed(
                lambda: turn(*given, **more), sampling[way]
            )
        steps = {way: stepper(trainer) for way, trainer in trainers.items()}
        for _ in range(flags.steps + 1):
            for way in WAYS:
                timed(steps[way], whole[way])
    found = {}
    for way in WAYS:
        columns = {"step": whole[way][1:], "sampling": sampling[way][1:]}
        found[way] = {
            f"{name} {kind}": statistics.median(pair[at] for pair in pairs)
            for name, pairs in columns.items()
            for at, kind in enumerate(("wall", "cpu"))
        }
    return found


def stepper(trainer: Any) -> Callable[[], None]:
    """A function that makes the trainer's next step: completions, rewards, loss, gradient, update."""
    trainer.create_optimizer_and_scheduler(num_training_steps=trainer.args.max_steps)
    trainer.current_gradient_accumulation_steps = 1
    loader = trainer.get_train_dataloader()
    batches = itertools.chain.from_iterable(itertools.repeat(loader))  # the questions again and again

    def step() -> None:
        trainer.training_step(trainer.model, next(batches), num_items_in_batch=None)
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        trainer.state.global_step += 1

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 5), ("prompts", 4), ("generations", 8), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path, help="file for the numbers")
    flags = parser.parse_args()
    found = measure(flags)
    print(
        f"{flags.prompts} prompts x {flags.generations} completions x {flags.tokens} tokens, "
        f"{torch.get_num_threads()} threads"
    )
    for name, ours in found["engine"].items():
        theirs = found["transformers"][name]
        print(f"{name:>14}: engine {ours:8.2f} s   transformers {theirs:8.2f} s   {theirs / ours:5.1f} times")
    if flags.json is not None:
        flags.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
