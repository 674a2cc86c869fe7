"""Reinforcement learning on one machine without a GPU: the demo model learns to tell stories in short words, by GRPO.

pip install "asyncengine[trl]" matplotlib
python examples/grpo_demo.py [--steps 60] [--plot grpo_demo.svg]

TRL's GRPOTrainer trains; an engine in the same process writes the stories. The reward of a story is the share of its
words that have no more than three letters.
"""

import argparse
import re
import tempfile
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from asyncengine import DEMO_MODEL, Engine
from asyncengine.integrations.trl import attach

ANIMALS = ("cat", "dog", "cow", "fox", "hen", "duck", "mouse", "horse")
NAMES = ("Tim", "Lio", "Mia", "Ana", "Ben", "Eva")
SHORT = 3


def prompts() -> Dataset:
    """Conversations that ask for a story."""
    asked = [f"Tell me a story about a {animal} named {name}." for animal in ANIMALS for name in NAMES]
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": text}] for text in asked]}).shuffle(seed=0)


def short_words(completions: list[Any], **_: Any) -> list[float]:
    """From 0 to 1 for each story."""
    stories = [re.findall(r"[^\W\d_]+", completion[0]["content"]) for completion in completions]
    return [sum(len(word) <= SHORT for word in words) / max(len(words), 1) for words in stories]


def main(steps: int = 60, plot: Path | None = None, batch: int = 32) -> list[dict[str, float]]:
    """Train for so many steps of `batch` stories; what the trainer logged at each."""
    with tempfile.TemporaryDirectory() as folder, Engine.from_pretrained("demo", dtype="float32") as engine:
        args = GRPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=batch, num_generations=8,
            max_completion_length=32, learning_rate=3e-4, lr_scheduler_type="constant", logging_steps=1, seed=1,
            use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        )  # fmt: skip
        trainer = GRPOTrainer(model=str(DEMO_MODEL), reward_funcs=short_words, args=args, train_dataset=prompts())
        attach(trainer, engine)
        trainer.train()
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    if plot is not None:
        draw(history, plot)
    return history


def draw(history: list[dict[str, float]], path: Path) -> None:
    """Plot the reward over the steps."""
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "grpo_demo"  # the same file for the same numbers
    figure, axes = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(range(1, len(history) + 1), [entry["reward"] for entry in history])
    axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="GRPO on the demo model")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--steps", type=int, default=60)
    flags.add_argument("--plot", type=Path, help="file for a plot of the reward (.svg, .png)")
    given = flags.parse_args()
    logged = main(given.steps, given.plot)
    first, last = ([entry["reward"] for entry in part] for part in (logged[:5], logged[-5:]))
    print(f"mean reward: {sum(first) / len(first):.2f} in the first steps, {sum(last) / len(last):.2f} in the last")
