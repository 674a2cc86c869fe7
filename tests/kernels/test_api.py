"""All that other units take of kernels is there, and nothing is imported before it is asked for."""

import subprocess
import sys

import pytest
import torch

from asyncengine.kernels import api
from asyncengine.kernels.cpu import compiler_missing

_PROGRAM = """
import sys
from asyncengine.kernels.api import CompileAhead, cache_root, can_start, elsewhere
print([name for name in ("torch", "numba", "triton") if name in sys.modules])
"""


def test_what_a_load_begins_with_is_there_without_torch() -> None:
    found = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout == "[]\n"


@pytest.mark.skipif(compiler_missing(torch.float32, torch.device("cpu")) is not None, reason="no compiler")
@pytest.mark.parametrize("name", api.__all__)
def test_each_name_is_there(name: str) -> None:
    pytest.importorskip("triton")
    assert getattr(api, name) is not None


def test_an_unknown_name_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match="'nothing'"):
        api.nothing  # noqa: B018
