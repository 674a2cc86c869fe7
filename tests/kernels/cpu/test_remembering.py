"""Compilers that remember answers give the same code, and ask less often."""

import json

import pytest
import torch
from support import forked

from asyncengine.kernels.cpu import compiler_missing

if compiler_missing(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("no compiler", allow_module_level=True)

_COMPILE = """
import json, sys
import numba
from numba.core.base import BaseContext
from numba.core.types.functions import BaseFunction
asked, measured = [], []
resolve, measure = BaseFunction.get_call_type, BaseContext.get_abi_sizeof
def get_call_type(self, *arguments):
    asked.append(str(self))
    return resolve(self, *arguments)
def get_abi_sizeof(self, ty):
    measured.append(str(ty))
    return measure(self, ty)
BaseFunction.get_call_type, BaseContext.get_abi_sizeof = get_call_type, get_abi_sizeof
if sys.argv[1:]:
    from asyncengine.kernels.cpu.remembering import remember
    remember()
@numba.njit
def first(a, b):
    c = a + b
    d = c + a
    e = d + b
    return e + a if e > a else e - a
found = [first(2, 3), first(2.5, 3.25), first(2, 0.5), first(True, 7)]
print(json.dumps([found, sum("built-in function add" in name for name in asked), len(measured)]))
"""


def compiled(*arguments: str) -> tuple[list[float], int, int]:
    """(what the functions gave, how often additions were asked for, and sizes)"""
    found, additions, sizes = json.loads(forked.run(_COMPILE, *arguments))
    return found, additions, sizes


def test_the_same_is_compiled_and_less_is_asked() -> None:
    expected, additions, sizes = compiled()
    assert expected == [12, 14.0, 7.0, 17]
    found, fewer, less = compiled("remember")
    assert found == expected
    assert 0 < fewer <= additions // 2
    assert 0 < less <= sizes // 2
