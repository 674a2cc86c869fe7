"""Tiles as LLVM compiles them for 64-bit ARM, on any machine: by its vectors' own instructions, and no function's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numba
import pytest
from llvmlite import ir

from asyncengine.kernels.cpu import packed, quantized_tiles, vectors, widened
from asyncengine.kernels.cpu.panel_form import PanelForm

TRIPLE = "aarch64-unknown-linux-gnu"
LONG = vectors.LONG


@pytest.fixture(autouse=True)
def arm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code is written as on such a CPU."""
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    monkeypatch.setattr(numba.config, "CPU_FEATURES", "+neon")
    for module, name, value in (
        (vectors, "NEON", True), (vectors, "HALVES", True), (vectors, "PAIRS", False), (vectors, "WIDE", False),
        (quantized_tiles, "_BYTE_DOTS", False), (quantized_tiles, "_SHORTS", False),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)


def compiled(write: Callable[..., None], count: int) -> list[str]:
    """Names of the instructions of a function of so many int64. It calls no other, but for filling memory."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = TRIPLE
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [LONG] * count), "tile")
    builder = ir.IRBuilder(function.append_basic_block())
    write(builder, *function.args)
    builder.ret_void()
    machine = llvm.Target.from_triple(TRIPLE).create_target_machine(cpu="generic", opt=3)
    parsed = llvm.parse_assembly(str(module))
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    passes = llvm.create_pass_builder(machine, options)
    passes.getModulePassManager().run(parsed, passes)
    text = machine.emit_assembly(parsed)
    assert set(re.findall(r"^\tbl\t(\w+)", text, re.MULTILINE)) <= {"memset"}
    return re.findall(r"^\t([a-z]\w*)", text, re.MULTILINE)


@pytest.mark.parametrize("kind", [numba.types.float32, numba.types.uint16])
@pytest.mark.parametrize(("rows", "panels"), [(1, 1), (1, 2), (2, 1), (4, 1)])
def test_products_of_floats(rows: int, panels: int, kind: Any) -> None:
    write = packed.write_narrow_tile if rows * panels <= 2 else packed.write_narrow_block
    names = compiled(lambda builder, *arguments: write(builder, rows, panels, kind, *arguments), 10)
    sides = 1 if kind == numba.types.float32 else 2
    assert names.count("fmla") >= rows * panels * sides * packed.WIDTH // 4


def test_products_of_widened_blocks() -> None:
    names = compiled(widened.write_tile, 6)
    assert names.count("fmla") == 3 * 6 * packed.WIDTH // 2 // 4  # of two inputs, then of an odd one


FORMS = [
    PanelForm(8, 0), PanelForm(4, 64, scale="bfloat16"), PanelForm(4, 32, "minima", 256), PanelForm(6, 16, block=256),
    PanelForm(8, 128, "zeros", scale="float32"), PanelForm(4, 32, "table", table=tuple(range(-127, 113, 15))),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_of_whole_numbers(form: PanelForm) -> None:
    """Pairs of 16 bits are added to sums of 32; bytes are looked up in a table, and float16 is widened, at once."""

    def write(builder: Any, *arguments: Any) -> None:
        quantized_tiles.WideWriter(builder, form, 1, False, numba.types.float32, arguments).write()

    names = compiled(write, 14)
    assert "sadalp" in names
    assert "tbl" in names or form.below != "table"
    assert "cmeq" not in names  # bytes compared with the table's places, one after the other
    if form.group and form.scale == "float16":
        assert "fcvtl" in names
