"""torch for CPUs brings no Triton, and macOS and Windows have none: an engine on a CPU must not ask for it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["triton"] = None  # any import of it raises ImportError

from asyncengine import Engine, SamplingParams

with Engine.from_pretrained("demo", device="cpu", show_progress=False) as engine:
    params = SamplingParams(max_tokens=4, temperature=0.7, top_p=0.9, seed=1)
    print(engine.generate("Once upon a time", params).usage.completion_tokens)
"""


def test_an_engine_on_a_cpu_needs_no_triton() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("4", 0), ran.stderr
