"""Descent of the demo encoders: Muon for matrices and AdamW for all else, within a budget of minutes or steps."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from makers.demo_model.muon import Muon


class Rates(Protocol):
    """Settings of a descent."""

    minutes: float
    steps: int
    """The budget in steps; 0: it is in minutes."""
    matrix_rate: float
    other_rate: float
    warmup: int
    """Steps over which rates rise."""
    decay_from: float
    """The part of the budget behind which rates fall."""


class Trainer(Protocol):
    """An object that can do a step."""

    options: Any
    step: int

    def update(self, done: float) -> float:
        """Do one step at `done` of the budget; the loss."""
        ...


class Descent:
    """The optimizers of one model."""

    def __init__(self, model: Any, rates: Rates, beside: tuple[str, ...] = ("embeddings",)) -> None:
        """`beside`: parts of the names of matrices that AdamW changes."""
        self._model, self._rates = model, rates
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and not any(part in name for part in beside)]
        taken = {id(parameter) for parameter in matrices}
        others = [parameter for _, parameter in named if id(parameter) not in taken]
        self._muon = Muon(matrices)
        self._adam = torch.optim.AdamW(others, lr=rates.other_rate, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, loss: Tensor, step: int, done: float) -> float:
        """Change the model by the gradient of `loss` in step number `step`, at `done` of the budget; the loss."""
        rates = self._rates
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        warm = min(1.0, (step + 1) / rates.warmup)
        rate = min(warm, max(0.0, min(1.0, (1 - done) / (1 - rates.decay_from))))
        self._muon.step(rates.matrix_rate * rate)
        self._adam.param_groups[0]["lr"] = rates.other_rate * rate
        self._adam.step()
        self._model.zero_grad(set_to_none=True)
        return float(loss.detach())


def run(trainer: Trainer) -> None:
    """Train until the budget is used, with a progress bar."""
    options, began, recent = trainer.options, time.monotonic(), 0.0
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.1f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("training", total=1.0)
        while True:
            seconds = time.monotonic() - began
            done = trainer.step / options.steps if options.steps else seconds / (60 * options.minutes)
            if done >= 1.0:
                return
            loss = trainer.update(done)
            recent = 0.95 * recent + 0.05 * loss if recent else loss
            bar.update(task, completed=done, description=f"step {trainer.step} loss {recent:.3f}")
            if trainer.step % 25 == 0:
                bar.console.print(f"{seconds:6.0f} s, step {trainer.step}, loss {recent:.3f}", highlight=False)
