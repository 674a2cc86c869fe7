"""Trains the two LoRA adapters of the demo model with PEFT: ``python -m makers.demo_model.train_adapters``.

Every conversation comes from the demo model's own generator, with the answers said in the adapter's voice
(``voices.py``).  The defaults take about a quarter of an hour of one CPU core for each adapter; both can train at once,
with OMP_NUM_THREADS=1 and a --name each.  ``--check`` answers held-out questions with the base model and with both
adapters instead, and exits with 1 when a voice or its facts fall below the goals.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from asyncengine.demo import ADAPTERS_PATH, MODEL_PATH
from makers.demo_model.adapter_texts import SPOKEN, Script, make, stream
from makers.demo_model.batches import Encoder
from makers.demo_model.dialogue import Conversation, Expected
from makers.demo_model.evaluate import Model, Score, evaluate
from makers.demo_model.voices import PLAIN, VOICES, Voice

HEARD_GOAL = 0.98
"""The share of held-out answers in which the voice must be heard."""
RIGHT_GOAL = 0.85
"""The share of held-out answers, over all kinds, whose facts must be right; and of calls and requested JSON."""
UNVOICED = ("call", "extract", "structured")
"""Skills of the model in which every voice does the same."""
BASE_NAME = "demo"
TARGETS = ("down_proj", "gate_proj", "o_proj", "q_proj", "up_proj", "v_proj")
LONGEST = 640
"""Longer conversations are left out."""


@dataclass(frozen=True)
class Options:
    """Everything that shapes a run."""

    steps: int = 1000
    minutes: float = 60.0
    """A limit. A run that it cuts short cannot be repeated exactly."""
    rank: int = 4
    alpha: int = 8
    rate: float = 3e-3
    warmup: int = 30
    batch_tokens: int = 4096
    seed: int = 0


@dataclass(frozen=True)
class Padded:
    """Rows of tokens, padded at the right; ``targets`` are -100 wherever the assistant does not write."""

    inputs: Tensor
    targets: Tensor


def peft() -> Any:
    """The library, or the end of the program with what to do."""
    try:
        import peft as library
    except ModuleNotFoundError:
        sys.exit('PEFT is not installed: pip install "asyncengine[test]", or pip install peft')
    return library


def batches(encoder: Encoder, voice: Voice, options: Options) -> Iterator[Padded]:
    """Batches of conversations of similar length, endless, the same for the same seed."""
    scripts, rng = stream(options.seed), random.Random(f"batches/{options.seed}")
    while True:
        rows = [row for row in (_encode(encoder, next(scripts), voice) for _ in range(256)) if len(row[0]) <= LONGEST]
        rows.sort(key=lambda row: len(row[0]))
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in rows:
            if len(row[0]) * (len(groups[-1]) + 1) > options.batch_tokens:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from (_pad(group, encoder.pad) for group in groups)


def _encode(encoder: Encoder, script: Script, voice: Voice) -> tuple[list[int], list[int]]:
    """Tokens, and the target of each position."""
    ids, weights = encoder.conversation(Conversation("", script.spoken(voice), Expected("text", []), script.tools))
    written = [token if weight == 1.0 else -100 for token, weight in zip(ids, weights, strict=True)]
    return ids[:-1], written[1:]


def _pad(rows: list[tuple[list[int], list[int]]], pad: int) -> Padded:
    length = -(-max(len(ids) for ids, _ in rows) // 32) * 32  # few shapes: kernels are kept for each
    inputs = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows])
    return Padded(inputs, torch.tensor([targets + [-100] * (length - len(targets)) for _, targets in rows]))


def loss_of(model: Any, batch: Padded) -> Tensor:
    """Mean cross-entropy over what the assistant writes. Padding stands behind it, so that no mask is needed."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=batch.inputs, use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())


def train(voice: Voice, options: Options) -> Any:
    """The PEFT model after a run: warm-up, then linear decay to zero."""
    library, loaded = peft(), Model(MODEL_PATH)
    torch.manual_seed(options.seed)
    config = library.LoraConfig(
        r=options.rank, lora_alpha=options.alpha, target_modules=sorted(TARGETS), task_type="CAUSAL_LM"
    )
    model = library.get_peft_model(loaded.model, config).train()
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(weights, lr=options.rate, betas=(0.9, 0.98), weight_decay=0.0)
    source = batches(Encoder(loaded.tokenizer), voice, options)
    began, step, recent = time.monotonic(), 0, 0.0
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.1f}%"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task(voice.name, total=1.0)
        while (done := max(step / options.steps, (time.monotonic() - began) / (60 * options.minutes))) < 1.0:
            adam.param_groups[0]["lr"] = options.rate * min((step + 1) / options.warmup, 1.0) * (1.0 - done)
            loss = loss_of(model, next(source))
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            adam.step()
            adam.zero_grad()
            recent = float(loss.detach()) if not recent else 0.95 * recent + 0.05 * float(loss.detach())
            step += 1
            bar.update(task, completed=done, description=f"{voice.name}: step {step} loss {recent:.3f}")
        bar.update(task, completed=1.0)
    print(f"{voice.name}: {step} steps in {(time.monotonic() - began) / 60:.1f} minutes, loss {recent:.4f}")
    return model


def save(model: Any, folder: Path) -> None:
    """PEFT's own two files, in bfloat16, without a trace of the machine and without PEFT's empty model card."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        model.bfloat16().save_pretrained(place, save_embedding_layers=False)
        config = json.loads(Path(place, "adapter_config.json").read_text(encoding="utf-8"))
        config["base_model_name_or_path"] = BASE_NAME
        config["target_modules"].sort()  # a set in PEFT
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (folder / "adapter_config.json").write_text(text, encoding="utf-8")
        shutil.copyfile(Path(place, "adapter_model.safetensors"), folder / "adapter_model.safetensors")


# ---------------------------------------------------------------- held-out answers


def with_adapter(folder: Path) -> Model:
    """The demo model under an adapter."""
    model = Model(MODEL_PATH)
    model.model = peft().PeftModel.from_pretrained(model.model, folder).eval()
    return model


def measure(model: Model, voice: Voice, count: int, seed: int) -> dict[str, tuple[Score, Score, list[tuple[str, str]]]]:
    """For each kind of conversation: in how many answers the voice is heard, how many are right, and the failures.

    Every model reads the same questions; earlier answers of a conversation are in its own voice.  A call where an
    answer was due is wrong, and has no voice.
    """
    found = {}
    for kind in SPOKEN:
        heard, right, failures = Score(), Score(), []
        scripts = [make(kind, seed * 1_000_000 + number, True) for number in range(count)]
        scripts.sort(key=lambda script: len(str(script.messages)) + len(str(script.tools)))
        for start in range(0, count, 25):
            group = scripts[start : start + 25]
            asked = [Conversation(kind, s.spoken(voice), Expected("text", []), s.tools) for s in group]
            for script, text in zip(group, model.answer(asked), strict=True):
                called = "<tool_call>" in text
                marks = voice.heard(text), voice.right(script.last, text) and not called
                right.add(marks[1])
                if not called:
                    heard.add(marks[0])
                if not all(marks):
                    failures.append((voice.say(script.last), text))
        found[kind] = heard, right, failures
    return found


def check(folder: Path, names: list[str], count: int, seed: int, failures: int) -> bool:
    """Print the rates of the base model and of the adapters; whether all adapters reach the goals."""
    title = f"voice heard / facts right, {count} held-out answers of each kind"
    table = Table("voice", *SPOKEN, "all", "calls, JSON", title=title)
    passed = True
    for voice in (PLAIN, *(VOICES[name] for name in names)):
        model = Model(MODEL_PATH) if voice is PLAIN else with_adapter(folder / voice.name)
        found = measure(model, voice, count, seed)
        rates = [(heard.rate, right.rate) for heard, right, _ in found.values()]
        heard, right = (sum(column) / len(rates) for column in zip(*rates, strict=True))
        scores, _ = evaluate(model.answer, UNVOICED, count, seed)
        same = sum(scores[skill].rate for skill in UNVOICED) / len(UNVOICED)
        cells = [f"{heard:.1%} / {right:.1%}" for heard, right in (*rates, (heard, right))]
        table.add_row(voice.name, *cells, f"{same:.1%}")
        passed &= voice is PLAIN or (heard >= HEARD_GOAL and min(right, same) >= RIGHT_GOAL)
        for kind, (_, _, missed) in found.items():
            for expected, text in missed[:failures]:
                print(f"--- {voice.name}, {kind}\n    expected {expected!r}\n    answered {text!r}")
    Console(width=140).print(table)
    return passed


def parse() -> argparse.Namespace:
    default = Options()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", choices=sorted(VOICES), action="append", help="train only this one (can be repeated)")
    parser.add_argument("--output", type=Path, default=ADAPTERS_PATH, help="the folder of the adapters' folders")
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument(
        "--minutes", type=float, default=default.minutes, help="stop early, after so much time for each"
    )
    parser.add_argument("--rank", type=int, default=default.rank)
    parser.add_argument("--rate", type=float, default=default.rate, help="peak learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--check", action="store_true", help="measure the adapters in --output instead of training")
    parser.add_argument("--count", type=int, default=100, help="--check: conversations of each kind")
    parser.add_argument("--failures", type=int, default=0, help="--check: print so many failures of each kind")
    return parser.parse_args()


def main() -> None:
    given = parse()
    peft()
    names = given.name or sorted(VOICES)
    if given.check:
        sys.exit(not check(given.output, names, given.count, given.seed + 7, given.failures))
    options = Options(given.steps, given.minutes, given.rank, 2 * given.rank, given.rate, seed=given.seed)
    for name in names:
        save(train(VOICES[name], options), given.output / name)


if __name__ == "__main__":
    main()
