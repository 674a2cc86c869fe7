"""Matrix products with weights in 16, 8 and 4 bits, alone: python -m benchmarks.quantized_products

`--stored`: as llama.cpp's files, AWQ and MXFP4 have them, too. The shapes of one layer and
of the output layer of Qwen3-0.6B. As many copies of a weight as exceed the caches take turns, as the layers of a model
do, and lie in huge pages as those do; the forms take turns as well. Medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np
import torch

from asyncengine.execution.device.arena import Arena, OutputBufferPool
from asyncengine.execution.layers.stored import GroupedRows, NumberForm, StoredForm
from asyncengine.execution.layers.stored_weight import GroupedWeight
from asyncengine.execution.layers.weight_forms import PackedWeight, QuantizedWeight, WeightForm
from asyncengine.kernels.cpu.team import Team

SHAPES = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
HEAD = (151936, 1024)
BEYOND_CACHES = 200_000_000
"""Weights of all copies of a shape."""
STORED = {
    "Q4_0": NumberForm(4, 32),
    "Q4_K": NumberForm(4, 32, "minima", 256),
    "Q5_K": NumberForm(6, 32, "minima", 256),
    "Q6_K": NumberForm(6, 16, "middle", 256),
    "Q8_0": NumberForm(8, 32),
    "AWQ": NumberForm(4, 128, "zeros"),
    "MXFP4": NumberForm(4, 32, "table", 0, "bfloat16", (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)),
}
BYTES: dict[str, float] = {}
"""Bytes of a weight, with its scales, by form."""
Form = Callable[[torch.Tensor], torch.Tensor]


class RandomMatrix:
    """A `StoredMatrix` of random numbers, all groups of which are alike."""

    def __init__(self, name: str, outputs: int, inputs: int) -> None:
        self.name, self.shape, self.form, self.order = name, (outputs, inputs), STORED[name], None

    def rows(self, first: int, last: int) -> GroupedRows:
        count, (_, inputs), form = last - first, self.shape, self.form
        numbers = np.random.default_rng(first).integers(0, 1 << form.bits, (count, inputs), dtype=np.uint8)
        scales = np.full((count, inputs // (form.block or form.group)), 2.0**-9, dtype=np.float32)
        steps = np.full((count, inputs // form.group), 33, dtype=np.int8)
        own, minima = steps if form.block else None, form.below == "minima"
        zeros = steps.astype(np.uint8) // 4 if form.below == "zeros" else None
        return GroupedRows(numbers, scales, own, zeros, scales if minima else None, own if minima else None)

    def release(self, first: int, last: int) -> None:
        pass


def stored_forms(outputs: int, inputs: int, arena: Arena) -> dict[str, WeightForm]:
    found: dict[str, WeightForm] = {}
    for name, form in STORED.items():
        found[name] = GroupedWeight(outputs, inputs, StoredForm(name, form), torch.bfloat16, arena.empty)
        found[name].load(0, RandomMatrix(name, outputs, inputs))
    return found


def forms_of(outputs: int, inputs: int, stored: bool) -> dict[str, WeightForm]:
    """One weight in every form."""
    dtype, arena = torch.bfloat16, Arena()
    forms: dict[str, WeightForm] = {
        "bf16": PackedWeight(outputs, inputs, dtype, empty=arena.empty),
        "int8": QuantizedWeight(outputs, inputs, 8, dtype, empty=arena.empty),
        "int4": QuantizedWeight(outputs, inputs, 4, dtype, empty=arena.empty),
    }
    weight = (torch.randn(outputs, inputs) * 0.02).bfloat16()
    for form in forms.values():
        form.load(0, weight)
    return forms | (stored_forms(outputs, inputs, arena) if stored else {})


def make_layer(outputs: int, inputs: int, stored: bool) -> dict[str, Form]:
    forms = forms_of(outputs, inputs, stored)
    BYTES.update({name: form.nbytes / (outputs * inputs) for name, form in forms.items()})
    return {name: lambda x, form=form: form.multiply(x, None) for name, form in forms.items()}  # type: ignore[misc]


def make_head(stored: bool) -> dict[str, Form]:
    """Logits, which are float32, beside torch's product."""
    forms = forms_of(*HEAD, stored)
    BYTES.update({name: form.nbytes / (HEAD[0] * HEAD[1]) for name, form in forms.items()})
    plain = (torch.randn(HEAD) * 0.02).bfloat16()
    memory = {name: OutputBufferPool() for name in forms}
    found: dict[str, Form] = {"bf16 F.linear": lambda x: torch.nn.functional.linear(x, plain)}
    found |= {
        name: lambda x, form=form, name=name: form.logits(x, None, memory[name])  # type: ignore[misc]
        for name, form in forms.items()
    }
    return found


def measure(copies: list[dict[str, Form]], rows: int, inputs: int, rounds: int) -> dict[str, float]:
    """Milliseconds of one product by form."""
    x = torch.randn(rows, inputs).bfloat16()
    times: dict[str, list[float]] = {name: [] for name in copies[0]}
    for turn in range(rounds + 1):
        for name, measured in times.items():
            for copy in copies:
                began = time.perf_counter()
                copy[name](x)
                if turn:
                    measured.append(time.perf_counter() - began)
    return {name: statistics.median(measured) * 1e3 for name, measured in times.items()}


def report(name: str, rows: int, shape: tuple[int, int], found: dict[str, float]) -> None:
    weights = shape[0] * shape[1]
    cells: list[Any] = [name, rows]
    for form, milliseconds in found.items():
        rate = weights * BYTES.get(form, 2.0) / milliseconds / 1e6
        cells.append(f"{form} {milliseconds:.3f} ms ({rate:.0f} GB/s, {found['bf16'] / milliseconds:.2f})")
    print(" | ".join(map(str, cells)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 16, 64, 256])
    parser.add_argument("--only", choices=[*SHAPES, "head"])
    parser.add_argument("--stored", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("milliseconds (bytes of weights over time, speed relative to packed bfloat16)")
    with torch.inference_mode(), closing(Team(options.threads)) as team, team.joined():
        layer: dict[int, Counter[str]] = {rows: Counter() for rows in options.rows}
        for name, shape in {**SHAPES, "head": HEAD}.items():
            if options.only not in (None, name):
                continue
            count = max(BEYOND_CACHES // (shape[0] * shape[1]), 1)
            copies = (
                [make_head(options.stored)]
                if name == "head"
                else [make_layer(*shape, options.stored) for _ in range(count)]
            )
            for rows in options.rows:
                found = measure(copies, rows, shape[1], options.rounds)
                report(name, rows, shape, found)
                if name != "head":
                    layer[rows].update(found)
        for rows, total in layer.items() if options.only is None else ():
            compared = ", ".join(f"{form} {total['bf16'] / time:.2f}" for form, time in total.items())
            print(f"all of a layer, {rows} rows, relative to packed bfloat16: {compared}")


if __name__ == "__main__":
    main()
