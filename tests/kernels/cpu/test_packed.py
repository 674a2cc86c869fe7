"""Products with weights in panels: near a float64 reference at every number of rows, and each row for itself."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from support.data import cases_of
from support.long import LONG
from support.teams import team_of

from asyncengine.kernels.cpu import packed, vectors, widened
from asyncengine.kernels.cpu.jit import tag_of

CASES = cases_of(__file__)

FLOAT, HALF = torch.float32, torch.bfloat16
FORMS = [(FLOAT, FLOAT), (HALF, FLOAT), (HALF, HALF)]
"""Types of x and of the result."""
SHAPES = [(32, 64), (32, 2), (96, 34), (160, 130), (64, 98), (64, 96), (37, 64), (75, 34)]
"""Outputs and inputs: one panel, even and odd numbers of them, outputs that fill none, inputs that are no multiples of
anything but two, and some of the matrix unit's steps."""
MANY = (100, 101, 133, 255)
SPARE = 4099
"""Elements before and after what a kernel may touch; odd, so that what lies between is aligned to nothing."""

forms = pytest.mark.parametrize(("dtype", "result"), FORMS)


def random(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def pack(weight: torch.Tensor) -> torch.Tensor:
    panels = packed.empty_panels(*weight.shape, weight.dtype)
    packed.pack_rows(weight, panels, 0)
    return panels


def product(
    x: torch.Tensor, weight: torch.Tensor, result: torch.dtype = FLOAT, bias: torch.Tensor | None = None
) -> torch.Tensor:
    out = torch.full((*x.shape[:-1], weight.shape[0]), float("nan"), dtype=result)
    packed.gemm(x, pack(weight), out, bias)
    return out


def check(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Each number is as near to the float64 one as the sizes of its terms allow."""
    x, weight = x.double(), weight.double()
    expected, terms = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        expected, terms = expected + bias.double(), terms + bias.double().abs()
    limit = 1e-6 * terms + (2**-8 * expected.abs() if found.dtype == HALF else 0.0)
    assert ((found.double() - expected).abs() <= limit).all()


def within(values: torch.Tensor, filling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`values` in the middle of memory filled with something else: (that memory, the values there)."""
    memory = torch.full((values.numel() + 2 * SPARE,), filling, dtype=values.dtype)
    inside = memory[SPARE:-SPARE].view(values.shape)
    inside.copy_(values)
    return memory, inside


def untouched(memory: torch.Tensor, filling: float) -> bool:
    return bool((memory[:SPARE] == filling).all() and (memory[-SPARE:] == filling).all())


# ---------------------------------------------------------------- the numbers


@forms
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(outputs: int, inputs: int, with_bias: bool, dtype: torch.dtype, result: torch.dtype) -> None:
    weight, bias = random(outputs, inputs, dtype=dtype), random(outputs) if with_bias else None
    for rows in (*range(1, 41), *MANY):
        x = random(rows, inputs, dtype=dtype)
        check(product(x, weight, result, bias), x, weight, bias)


def test_an_odd_number_of_inputs() -> None:
    for inputs in (1, 33, 101):
        x, weight = random(7, inputs), random(64, inputs)
        check(product(x, weight), x, weight, None)


@forms
def test_wide_rows(dtype: torch.dtype, result: torch.dtype) -> None:
    """A few rows of 4 KiB are multiplied panel by panel, many by blocks of panels of which the last is shorter."""
    inputs = 4096 // dtype.itemsize
    x, weight = random(90, inputs, dtype=dtype), random(21 * 32, inputs, dtype=dtype)
    many = product(x, weight, result)
    check(many, x, weight, None)
    for rows in (1, 12, 29, 64, 65):
        assert torch.equal(product(x[:rows], weight, result), many[:rows])


def test_results_are_rounded_as_torch_rounds() -> None:
    for rows in (1, 5, 12, 29):
        x, weight, bias = random(rows, 130, dtype=HALF), random(96, 130, dtype=HALF), random(96)
        assert torch.equal(product(x, weight, HALF, bias), product(x, weight, FLOAT, bias).bfloat16())


def test_ties_and_overflow_are_rounded_as_torch_rounds() -> None:
    """Sums that lie between two bfloat16: in the middle, a little off it, and beyond the largest."""
    step, largest = 2.0**-7, float(torch.finfo(HALF).max)
    pairs = [
        (1.0, step / 2), (1 + step, step / 2), (1.0, step * 0.498046875), (1.0, step * 0.50390625),
        (largest, 2.0**119), (largest, 2.0**118),
    ]  # fmt: skip
    weight = torch.zeros((32, 2), dtype=HALF)
    for place, pair in enumerate(pairs):
        weight[2 * place] = torch.tensor(pair)
        weight[2 * place + 1] = -torch.tensor(pair)
    exact = product(torch.ones((3, 2), dtype=HALF), weight)
    found = product(torch.ones((3, 2), dtype=HALF), weight, HALF)
    assert torch.equal(exact.double(), weight.double().sum(1).expand(3, -1))
    assert torch.equal(found, exact.bfloat16())
    assert found[0, :4].tolist() == [1.0, -1.0, 1 + 2 * step, -1 - 2 * step]
    assert found[0, 8:11].tolist() == [float("inf"), -float("inf"), largest]


# ---------------------------------------------------------------- each row for itself


@forms
def test_rows_do_not_depend_on_their_neighbours(dtype: torch.dtype, result: torch.dtype) -> None:
    x, weight, bias = random(133, 130, dtype=dtype), random(96, 130, dtype=dtype), random(96)
    together = product(x, weight, result, bias)
    for rows in (*range(1, 41), *MANY[:2]):
        for first in (0, 133 - rows):
            some = slice(first, first + rows)
            assert torch.equal(product(x[some], weight, result, bias), together[some])


@forms
@pytest.mark.parametrize("count", [1, 2, 7])
def test_rows_do_not_depend_on_threads(count: int, dtype: torch.dtype, result: torch.dtype) -> None:
    """No panel is left out where there are fewer of them than threads."""
    x, weight = random(13, 98, dtype=dtype), random(32 * count, 98, dtype=dtype)
    alone = product(x, weight, result)
    check(alone, x, weight, None)
    for threads in (2, 3, 5, 16):
        with team_of(threads) as team:
            assert torch.equal(product(x, weight, result), alone)
            assert team.account.pieces == (count if count > 1 else 0)


@forms
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("rows", "bad"), [(1, 0), (5, 0), (5, 2), (13, 7), (13, 12)])
def test_what_is_not_finite_stays_in_its_row(
    rows: int, bad: int, value: float, dtype: torch.dtype, result: torch.dtype
) -> None:
    """Rows that two tiles have in common are no exception."""
    x, weight = random(rows, 66, dtype=dtype), random(64, 66, dtype=dtype)
    clean = product(x, weight, result)
    x[bad, 65] = value
    found = product(x, weight, result)
    others = [row for row in range(rows) if row != bad]
    assert not torch.isfinite(found[bad]).any()
    assert torch.equal(found[bad].isnan(), torch.full((64,), value != value))  # noqa: PLR0124
    assert torch.equal(found[others], clean[others])


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7F800001, -1])
def test_no_nan_is_rounded_to_a_number(bits: int) -> None:
    bias = torch.zeros(32)
    bias.view(torch.int32)[5] = bits
    found = product(random(4, 2, dtype=HALF), random(32, 2, dtype=HALF), HALF, bias)
    assert found.isnan().nonzero()[:, 1].tolist() == [5] * 4


@pytest.mark.parametrize(("dtype", "result"), FORMS if LONG else FORMS[1:])
@pytest.mark.parametrize(("panels", "inputs"), [(1, 34), (9, 258), (2, 600), (3, 257)])
def test_widened_blocks(panels: int, inputs: int, dtype: torch.dtype, result: torch.dtype) -> None:
    """One row or hundreds, whole blocks or parts of them have the bits of tiles in float32, on any CPU.

    Compiling takes most of a minute for each type; with float32, where nothing is widened, in the long form alone.
    """
    inputs += inputs % 2 if dtype == HALF else 0
    x, weight, bias = random(133, inputs, dtype=dtype), random(32 * panels, inputs, dtype=dtype), random(32 * panels)
    size, across, packs = inputs * dtype.itemsize, 32 * panels * result.itemsize, pack(weight)
    for added in (None, bias):
        expected = product(x.float(), weight.float(), FLOAT, added).to(result)
        for rows in (1, 6, 21, 96, 97, 133):
            memory, out = within(torch.zeros((rows, 32 * panels), dtype=result), 7.0)
            widened.multiply_widened(
                x.data_ptr(), packs.data_ptr(), 0 if added is None else added.data_ptr(), out.data_ptr(), across, rows,
                size, 0, panels, tag_of(dtype), result.itemsize,
            )  # fmt: skip
            assert torch.equal(out, expected[:rows])
            assert untouched(memory, 7.0)


# ---------------------------------------------------------------- memory


@forms
@pytest.mark.parametrize("rows", [1, 5, 7, 12, 13, 29])
def test_nothing_else_is_written_or_read(rows: int, dtype: torch.dtype, result: torch.dtype) -> None:
    """Operands lie at addresses that are aligned to nothing, between numbers that would show in the result."""
    for outputs in (96, 75):
        x, weight, bias = random(rows, 34, dtype=dtype), random(outputs, 34, dtype=dtype), random(outputs)
        given = [within(part, float("nan")) for part in (x, pack(weight), bias)]
        memory, out = within(torch.zeros((rows, outputs), dtype=result), 7.0)
        packed.gemm(given[0][1], given[1][1], out, given[2][1])
        assert untouched(memory, 7.0)
        assert torch.equal(out, product(x, weight, result, bias))
        assert torch.equal(given[0][1], x)


def test_no_rows() -> None:
    assert product(torch.empty(0, 64), random(32, 64)).shape == (0, 32)
    assert product(torch.empty(2, 0, 64), random(32, 64)).shape == (2, 0, 32)


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_x_that_is_not_contiguous(dtype: torch.dtype) -> None:
    weight, wide = random(64, 34, dtype=dtype), random(10, 68, dtype=dtype)
    for x in (wide[:, :34], wide[::3, 34:], random(34, 5, dtype=dtype).T, wide.view(5, 2, 68)[..., 7:41]):
        assert not x.is_contiguous()
        assert torch.equal(product(x, weight), product(x.contiguous(), weight))
        check(product(x, weight), x, weight, None)


# ---------------------------------------------------------------- panels


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_layout(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    """The layout is as the module documents it, whatever the weight's strides."""
    weight = random(outputs, inputs, dtype=dtype)
    step = 2 if dtype == HALF else 1
    made = pack(weight)
    assert made.shape == (-(-outputs // 32), inputs // step, 2, 16, step)
    assert made.is_contiguous()
    assert made.dtype == dtype
    assert torch.equal(made.permute(0, 2, 3, 1, 4).reshape(-1, inputs)[:outputs], weight)
    turned = pack(weight.T.contiguous().T)
    assert torch.equal(turned[: outputs // 32], made[: outputs // 32])


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_rows_are_read_back(dtype: torch.dtype, threads: int) -> None:
    """Bit for bit, what is not finite as well."""
    with team_of(threads):
        read_back(dtype)


def read_back(dtype: torch.dtype) -> None:
    for outputs, inputs in SHAPES:
        weight = random(outputs, inputs, dtype=dtype)
        weight[3, 1] = float("inf")
        made = pack(weight)
        every = torch.arange(outputs)
        for ids in (every, every.flip(0), torch.tensor([[31, 0, 16], [15, 0, outputs - 1]]), every[:0], every[3:4]):
            memory, out = within(torch.zeros((*ids.shape, inputs), dtype=dtype), 7.0)
            packed.read_rows(ids, made, out)
            assert torch.equal(out, weight[ids])
            assert untouched(memory, 7.0)


@pytest.mark.parametrize(
    ("dtype", "inputs", "fits"),
    [(HALF, 2, True), (HALF, 3, False), (FLOAT, 3, True), (torch.float16, 64, False), (torch.int32, 64, False)],
)
def test_what_fits(dtype: torch.dtype, inputs: int, fits: bool) -> None:
    assert packed.packing_fits(dtype, inputs) == fits


@pytest.mark.parametrize(("features", "floats", "halves"), CASES["panels"])
def test_where_panels_pay(features: str, floats: bool, halves: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", features)
    assert packed.packing_pays(FLOAT) == floats
    assert packed.packing_pays(HALF) == halves
    assert not packed.packing_pays(torch.float16)


@pytest.mark.parametrize(("variables", "may"), CASES["onednn"])
def test_onednns_own_limit_holds_for_these_kernels(variables: dict[str, str], may: bool) -> None:
    assert vectors.may_use_matrix_unit(variables) is may


@pytest.mark.parametrize(
    ("machine", "has"), [("aarch64", True), ("arm64", True), ("x86_64", False), ("riscv64", False)]
)
def test_what_the_compiler_does_not_know_of_arm(machine: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may name no features, as on Apple's systems: 64-bit ARM has its vectors all the same."""
    import llvmlite.binding
    import numba

    monkeypatch.setattr(vectors, "features_here", vectors.features_here.__wrapped__)
    monkeypatch.setattr(llvmlite.binding, "get_host_cpu_features", dict)
    monkeypatch.setattr(vectors.platform, "machine", lambda: machine)
    for name in ("CPU_NAME", "CPU_FEATURES"):
        monkeypatch.setattr(numba.config, name, None)
    assert packed.packing_pays(FLOAT) is has
    assert packed.packing_pays(HALF) is has
    assert (packed.why_not_packed(FLOAT) is None) is has
    assert not vectors.cpu_has("avx2")


# ---------------------------------------------------------------- tiles


def test_tiles_cover_every_row() -> None:
    """No other row is covered; tiles are as few as the sizes there are allow, and the smallest that do it."""
    for rows in range(1, 301):
        tile, tiles = packed.tiles_for(rows)
        covered = {min(turn * tile, rows - tile) + row for turn in range(tiles) for row in range(tile)}
        assert covered == set(range(rows))
        assert (tiles, tile) == min((-(-rows // size), size) for size in packed.SIZES if size <= rows)


@pytest.mark.skipif(not vectors.UNIT, reason="no matrix unit here: the other tests run without it")
def test_without_the_matrix_unit() -> None:
    """The tests of numbers in a process whose oneDNN may not use it."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "product or neighbours"]
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
