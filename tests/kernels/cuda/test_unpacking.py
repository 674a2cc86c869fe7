"""The PTX by which four bytes become numbers of 16 bits, carried out instruction by instruction on every byte."""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.stored_matrices import TABLE

from asyncengine.kernels.cuda.packed_matmul import unpacking


def permute(low: int, high: int, selector: int) -> int:
    """`prmt`: four of the eight bytes of two words, each chosen by four bits, of which no highest is set here."""
    given = struct.pack("<II", low, high)
    places = [selector >> shift & 15 for shift in (0, 4, 8, 12)]
    assert max(places) < 8, "the sign would be spread instead"
    return int(struct.unpack("<I", bytes(given[place] for place in places))[0])


OPERATIONS: dict[str, Callable[..., int]] = {
    "mov": lambda a: a, "not": lambda a: ~a, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "shl": lambda a, b: a << b, "shr": lambda a, b: a >> b, "prmt": lambda a, b, c: permute(a, b, c & 0xFFFF),
}  # fmt: skip


def halves(word: int, dtype: torch.dtype) -> torch.Tensor:
    """float64 [2]: the two numbers of 16 bits in a word."""
    return torch.tensor(np.array([word], np.uint32).view(np.int16)).view(dtype).double()


def run(code: str, inputs: dict[str, int], dtype: torch.dtype) -> torch.Tensor:
    """[4] numbers in `$0` and `$1`."""
    words = dict(inputs)

    def value(name: str) -> int:
        return words[name] if name in words else int(name, 0)

    for line in code.strip("{ }").split(";")[1:]:
        if not line.strip():
            continue
        operation, _, rest = line.strip().partition(" ")
        target, *sources = rest.replace(" ", "").split(",")
        given = [value(source) for source in sources]
        name = operation.split(".")[0]
        if name == "fma":
            factors = [halves(word, dtype) for word in given]
            made = (factors[0] * factors[1] + factors[2]).to(dtype)
            words[target] = int(made.view(torch.int16).numpy().view(np.uint32)[0])
            continue
        words[target] = OPERATIONS[name](*given) & 0xFFFFFFFF
    return torch.cat([halves(words[target], dtype) for target in ("$0", "$1")])


FORMS = [(4, 8, ()), (4, 0, ()), (8, 128, ()), (8, 0, ()), (8, 32, ()), (4, 0, TABLE)]
"""(bits, middle, table); without a middle, groups have zeros."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("bits", "middle", "table"), FORMS)
def test_every_byte_becomes_its_numbers(bits: int, middle: int, table: tuple[int, ...], dtype: torch.dtype) -> None:
    codes = unpacking(dtype == torch.bfloat16, bits, middle, table)
    if bits == 8 and not middle and dtype == torch.bfloat16:
        assert codes == ("", ""), "its numbers less their zeros have nine bits"
        return
    zero, offset = middle or 5, 128 if dtype == torch.bfloat16 else 1024
    taken = torch.full((2,), -offset - zero, dtype=torch.float64).to(dtype)
    operand = int(taken.view(torch.int16).numpy().view(np.uint32)[0])
    for half, code in enumerate(codes if bits == 4 else codes[:1]):
        for byte in range(64 if middle == 32 else 256):
            others = [byte, byte ^ 0x3F, byte ^ 0x1A, 0]
            found = run(code, {"$2": struct.unpack("<I", bytes(others))[0], "$3": operand, "$4": operand}, dtype)
            numbers = [each >> 4 * half & 15 for each in others] if bits == 4 else others
            expected = [table[number] if table else number - zero for number in numbers]
            assert found.tolist() == expected, (half, byte)


def test_tables_that_are_no_numbers_with_signs_have_none() -> None:
    assert unpacking(True, 4, 0, tuple(range(-127, 113, 15))) == ("", "")
