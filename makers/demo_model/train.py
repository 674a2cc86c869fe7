"""Trains the demo model: ``python -m makers.demo_model.train``.

The defaults take just under two hours on two CPU cores.  The run can be stopped at any moment and continues from its
last checkpoint; the learning rate stays constant until the last part of the budget and then falls to zero.  A finished
run can be extended: a larger budget raises the rate again to where the new schedule has it.  The shipped weights were
made so, in three stretches; the model card has the commands.

``--draft`` trains the small model that guesses for it, from the same conversations: minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn import functional

from asyncengine.demo import DRAFT_PATH, MODEL_PATH
from makers.demo_model.batches import Batch, Encoder
from makers.demo_model.export import export
from makers.demo_model.llama import DRAFT, Llama, Shape
from makers.demo_model.muon import Muon

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass
class Options:
    """Everything that shapes a run."""

    folder: Path
    minutes: float = 115.0
    tokens: int = 0
    seed: int = 0
    batch_tokens: int = 6144
    matrix_rate: float = 0.02
    other_rate: float = 0.004
    warmup: int = 60
    decay_from: float = 0.6
    long_from: float = 0.15
    checkpoint_minutes: float = 4.0
    compile: bool = True
    draft: bool = False
    """Train the small model that guesses."""
    output: Path | None = None

    @property
    def shape(self) -> Shape:
        return DRAFT if self.draft else Shape()


@dataclass
class Progressed:
    """Progress of a run; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """Model, optimizers and position in the data."""

    def __init__(self, options: Options, tokenizer: Any) -> None:
        self.options = options
        self.encoder = Encoder(tokenizer)
        self.model = Llama(replace(options.shape, vocab_size=len(tokenizer)), options.seed)
        matrices = [p for name, p in self.model.named_parameters() if p.ndim == 2 and name != "embed"]
        others = [p for name, p in self.model.named_parameters() if p.ndim == 1 or name == "embed"]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, lr=options.other_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.at = Progressed()
        if options.compile:
            for layer in self.model.layers:
                layer.compile(dynamic=False)
            self.loss: Loss = torch.compile(cross_entropy, dynamic=False)
        else:
            self.loss = cross_entropy

    @property
    def fraction(self) -> float:
        """The part of the budget that is used."""
        if self.options.tokens:
            return self.at.tokens / self.options.tokens
        return self.at.seconds / (60 * self.options.minutes)

    def rate(self) -> float:
        """Warm-up, constant, then linear decay to zero (Hu et al. 2024 call it WSD)."""
        warm = min(1.0, (self.at.step + 1) / self.options.warmup)
        left = (1 - self.fraction) / (1 - self.options.decay_from)
        return min(warm, max(0.0, min(1.0, left)))

    def length(self, step: int) -> int:
        """Mostly short rows; long ones once copying works."""
        if self.fraction < self.options.long_from:
            return 512
        draw = random.Random(f"length/{self.options.seed}/{step}").random()
        return 512 if draw < 0.85 else 1024 if draw < 0.96 else 2048

    def recall(self) -> float:
        """The share of recall practice: large at the start, small for ever."""
        return max(0.06, 0.5 * (1 - self.at.tokens / 3e6))

    def prepare(self, step: int) -> Batch:
        length = self.length(step)
        return self.encoder.batch(self.options.seed, step, self.options.batch_tokens // length, length, self.recall())

    def update(self, batch: Batch) -> float:
        """One optimizer step; returns the loss."""
        hidden = self.model.hidden_states(batch.inputs, batch.documents, torch.bfloat16)
        loss = self.loss(hidden, self.model.embed, batch.targets, batch.weights)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        scale = self.rate()
        self.muon.step(self.options.matrix_rate * scale)
        for group in self.adam.param_groups:
            group["lr"] = self.options.other_rate * scale
        self.adam.step()
        for parameter in self.model.parameters():
            parameter.grad = None
        return float(loss.detach())

    def save(self, path: Path) -> None:
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state(),
            "adam": self.adam.state_dict(),
            "at": asdict(self.at),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def load(self, path: Path) -> None:
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.muon.load(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.at = Progressed(**state["at"])


def cross_entropy(hidden: Tensor, embed: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Mean cross-entropy under the weights of the tokens."""
    logits = functional.linear(hidden, embed.to(hidden.dtype)).float()
    losses = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return (losses * weights.flatten()).sum() / weights.sum()


def feed(trainer: Trainer, batches: queue.Queue[Batch], stopped: threading.Event) -> None:
    """Prepare batches ahead of the training step."""
    step = trainer.at.step
    while not stopped.is_set():
        batch = trainer.prepare(step)
        step += 1
        while not stopped.is_set():
            try:
                batches.put(batch, timeout=0.5)
                break
            except queue.Full:
                continue


def run(trainer: Trainer) -> None:
    """Train until the budget is used, with checkpoints and one log line for every 20 steps."""
    options = trainer.options
    checkpoint = options.folder / "checkpoint.pt"
    batches: queue.Queue[Batch] = queue.Queue(maxsize=6)
    stopped = threading.Event()
    worker = threading.Thread(target=feed, args=(trainer, batches, stopped), daemon=True)
    worker.start()
    saved, recent = time.monotonic(), 0.0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.1f}%"),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns) as bar, (options.folder / "log.jsonl").open("a") as log:
            task = bar.add_task("training", total=1.0)
            while trainer.fraction < 1.0:
                started = time.monotonic()
                batch = batches.get()
                loss = trainer.update(batch)
                recent = loss if not recent else 0.95 * recent + 0.05 * loss
                trainer.at.step += 1
                trainer.at.tokens += batch.inputs.numel()
                trainer.at.seconds += time.monotonic() - started
                bar.update(task, completed=trainer.fraction, description=f"step {trainer.at.step} loss {recent:.3f}")
                if trainer.at.step % 20 == 0:
                    log.write(
                        json.dumps({**asdict(trainer.at), "loss": round(recent, 4), "rate": round(trainer.rate(), 4)})
                        + "\n"
                    )
                    log.flush()
                if time.monotonic() - saved > 60 * options.checkpoint_minutes:
                    trainer.save(checkpoint)
                    saved = time.monotonic()
    finally:
        stopped.set()
        trainer.save(checkpoint)


def parse() -> Options:
    default = Options(Path(".demo-train"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=default.folder, help="checkpoints and log (resumed when present)"
    )
    parser.add_argument("--minutes", type=float, default=default.minutes, help="training time, over all resumed parts")
    parser.add_argument("--tokens", type=int, default=0, help="budget in tokens instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--matrix-rate", type=float, default=default.matrix_rate, help="peak learning rate of Muon")
    parser.add_argument("--other-rate", type=float, default=default.other_rate, help="peak learning rate of AdamW")
    parser.add_argument(
        "--decay-from", type=float, default=default.decay_from, help="part of the budget where the decay starts"
    )
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="train without torch.compile")
    parser.add_argument("--draft", action="store_true", help="train the small model that guesses for the demo model")
    parser.add_argument("--output", type=Path, help="where the finished model is exported (default: the package)")
    found = vars(parser.parse_args())
    return Options(**found)


def main() -> None:
    from transformers import AutoTokenizer

    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options.folder.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(options, AutoTokenizer.from_pretrained(MODEL_PATH))
    checkpoint = options.folder / "checkpoint.pt"
    if checkpoint.exists():
        trainer.load(checkpoint)
    try:
        run(trainer)
    except KeyboardInterrupt:
        print(f"stopped at step {trainer.at.step}; run again to continue")
        return
    export(checkpoint, options.output or (DRAFT_PATH if options.draft else MODEL_PATH), options.shape)


if __name__ == "__main__":
    main()
