"""Low-rank deltas in Triton against one product for each row, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from support.bfloat16_dots import with_bfloat16_dots

from asyncengine.kernels.cuda import lora
from asyncengine.kernels.cuda.lora import Factors, add_deltas, tiles_of

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
NEAR = {FLOAT: 1e-5, BRAIN: 2e-2, HALF: 3e-3}


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    with_bfloat16_dots(monkeypatch)


@pytest.fixture(params=["a few rows", "in tiles"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(lora, "_FEW", 10_000 if request.param == "a few rows" else 0)
    return str(request.param)


class Case:
    """Random factors, inputs and outputs, of which rows lie apart."""

    def __init__(
        self, widths: Sequence[int], inputs: int, rank: int, slots: Sequence[int], count: int, dtype: torch.dtype,
        out: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.ends = [0, *accumulate(widths)]
        self.a = (random(count, len(widths), rank, inputs) / inputs**0.5).to(dtype)
        self.b = (random(count, rank, self.ends[-1]) / rank**0.5).to(dtype)
        self.slots, self.count = torch.tensor(slots), count
        self.x = random(len(slots), inputs + 3).to(dtype)[:, 3:]
        self.y = random(len(slots), self.ends[-1] + 2).to(out or dtype)[:, 2:]

    def wanted(self) -> torch.Tensor:
        total = self.y.float().clone()
        for row, slot in enumerate(self.slots.tolist()):
            for part, (left, right) in enumerate(pairwise(self.ends)):
                if slot >= 0:
                    down = self.x[row].float() @ self.a[slot, part].float().T
                    total[row, left:right] += down @ self.b[slot, :, left:right].float()
        return total

    def found(self, tiles: Any = None) -> torch.Tensor:
        y = self.y.clone(memory_format=torch.preserve_format)
        factors = Factors.of(self.a, self.b, self.ends)
        add_deltas(self.x, y, factors, self.slots, tiles or (lambda: tiles_of(self.slots, self.count)))
        return y


SOME = [2, -1, 0, 2, 2, -1, 1, 0]


@pytest.mark.parametrize("case", [
    Case([24], 20, 8, [1], 2, FLOAT), Case([32, 8, 8], 48, 16, SOME, 4, BRAIN), Case([9, 6], 33, 8, SOME, 3, HALF),
    Case([300], 1100, 24, SOME, 3, BRAIN, FLOAT), Case([16, 160], 64, 72, SOME, 3, FLOAT),
    Case([16], 40, 8, [-1] * 3, 2, BRAIN), Case([16], 4200, 8, [0, 1], 2, FLOAT),
    Case([48], 32, 136, [0] * 3, 1, FLOAT), Case([16], 40, 8, [3] * 40 + [-1] * 5 + [0] * 17, 5, FLOAT),
])  # fmt: skip
def test_each_row_gets_its_own(case: Case, form: str) -> None:
    found = case.found()
    torch.testing.assert_close(found.float(), case.wanted(), rtol=NEAR[case.x.dtype], atol=NEAR[case.x.dtype])
    without = case.slots < 0
    assert torch.equal(found[without], case.y[without])


def test_a_row_does_not_depend_on_those_beside_it(form: str) -> None:
    case, alone = (Case([40, 8], 600, 16, slots, 4, FLOAT) for slots in (SOME, [2]))
    alone.a, alone.b, alone.x, alone.y = case.a, case.b, case.x[:1], case.y[:1]
    case.x[1:] = torch.inf
    assert torch.equal(case.found()[:1], alone.found())


@pytest.mark.parametrize("rows", [1, 5, 64, 257, 600])
def test_tiles(rows: int) -> None:
    """Each row with a slot is in one tile of that slot, in order, and no tile that could be needed is missing."""
    generator = torch.Generator().manual_seed(rows)
    for count in (1, 6, 40):
        slots = torch.randint(-1, count, (rows,), generator=generator)
        tiles = tiles_of(slots, count)
        height = tiles.rows.shape[1]
        seen: dict[int, list[int]] = {}
        for slot, own in zip(tiles.slots.tolist(), tiles.rows.tolist(), strict=True):
            inside = [row for row in own if row >= 0]
            assert bool(inside) == (slot >= 0)
            assert own == inside + [-1] * (height - len(inside))
            if inside:
                seen.setdefault(slot, []).extend(inside)
        wanted = {slot: torch.nonzero(slots == slot).flatten().tolist() for slot in range(count)}
        assert seen == {slot: own for slot, own in wanted.items() if own}
