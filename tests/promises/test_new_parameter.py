"""A made-up sampling parameter: one declaration brings it everywhere, and what does not know it refuses it by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from support.worded_model import make_worded_model

from asyncengine import Engine, InvalidParameter, SamplingParams
from asyncengine.checks import integer_in, number_in
from asyncengine.engine.validation import RequestValidator
from asyncengine.execution.sampling import logit_processors
from asyncengine.info import IN_STEP
from asyncengine.options import RequestOptions
from asyncengine.sampling_params import READS_OUTPUT

ROOT = Path(__file__).parents[2]
PROMPT = "Well, who is there? Who is there? Who is"
SURFACES = """
import importlib.util, pickle, sys

with open("asyncengine/sampling_params.py", encoding="utf-8") as file:
    source = file.read()
declaration = '    flavour: Annotated[float, number_in(0.0, 9.0), OFFERED] = 0.0\\n    \"\"\"Made up.\"\"\"\\n'
with open(sys.argv[1], "w", encoding="utf-8") as file:
    file.write(source.replace("    min_tokens: ", declaration + "    min_tokens: ", 1))
found = importlib.util.spec_from_file_location("asyncengine.sampling_params", sys.argv[1])
module = sys.modules[found.name] = importlib.util.module_from_spec(found)
found.loader.exec_module(module)

from asyncengine import SamplingParams
from asyncengine.integrations.cli.main import build_parser
from asyncengine.integrations.cli.options import sampling_params
from asyncengine.integrations.fields import CALL_KEYWORDS, EngineFields
from asyncengine.integrations.http.fields import TABLES, Fields
from tools import fields_page, openapi_document, settings_page

assert SamplingParams is module.SamplingParams
args = build_parser().parse_args(["generate", "demo", "x", "--flavour", "2.5"])
assert sampling_params(args).flavour == 2.5
for table in ("chat", "completions", "responses", "messages"):
    assert Fields({"flavour": 3}).read({"flavour": TABLES[table]["flavour"]})["params"] == {"flavour": 3}
assert "| `flavour` | `--flavour` | `0.0` | >= 0 and <= 9 | Made up. |" in settings_page.page()
assert "`flavour`" in fields_page.page()
assert '"flavour"' in openapi_document.text()
assert "flavour" in CALL_KEYWORDS
assert EngineFields(model="demo", model_kwargs={"flavour": 4})._call(None, {}).params.flavour == 4
assert EngineFields(model="demo")._call(None, {"flavour": 5}).params.flavour == 5
assert pickle.loads(pickle.dumps(SamplingParams(flavour=6))).flavour == 6
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Params(SamplingParams):
    flavour: Annotated[float, number_in(0.0, 9.0)] = 0.0
    apart: Annotated[int, integer_in(0), READS_OUTPUT] = 0


def flavoured(value: float, output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits in which likely tokens are likelier still."""
    return logits.where(logits < logits.max() - 10 / value, logits + value)


def kept_apart(value: int, output: list[int], logits: torch.Tensor) -> torch.Tensor:
    """Logits that leave out tokens of the last one's remainder by `value`."""
    logits[sum(output[-1:]) % value :: value] = -float("inf")
    return logits


def applied(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda value, row, logits: own(
        value, row.tokens[row.spec.prompt_len : row.start + row.num_scheduled], logits
    )


def test_one_declaration_brings_it_everywhere(tmp_path: Path) -> None:
    """The command, HTTP, the pages, the frameworks' keywords and what goes to other processes."""
    command = [sys.executable, "-c", SURFACES, str(tmp_path / "sampling_params.py")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_parameters_of_steps_are_known_on_a_cpu_and_to_gpus_by_name() -> None:
    cpu, gpu = (logit_processors.known_on(torch.device(name)) for name in ("cpu", "cuda"))
    assert sorted(cpu) == sorted(IN_STEP)
    assert set(cpu) - set(gpu) == set(logit_processors.PROCESSORS)


def opened(folder: Path, **settings: Any) -> Engine:
    given: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "4MB", "num_threads": 1, "show_progress": False}
    return Engine.from_pretrained(folder, **given, **settings)


def test_what_does_not_know_it_refuses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_worded_model(tmp_path)
    params = Params(max_tokens=12, temperature=1.0, seed=3)
    with opened(folder) as engine:
        assert len(engine.generate(PROMPT, params).token_ids) == 12
        for name in ("flavour", "apart"):
            with pytest.raises(InvalidParameter, match=f"{name}: cannot be had: steps on cpu do not know it"):
                engine.generate(PROMPT, params.replace(**{name: 3}))
    functions: dict[str, Callable[..., torch.Tensor]] = {"flavour": flavoured, "apart": kept_apart}
    for name, own in functions.items():
        monkeypatch.setitem(logit_processors.PROCESSORS, name, applied(own))
    with opened(folder, speculation="lookup", max_steps_in_flight=2) as engine:
        plain = engine.generate(PROMPT, params).token_ids
        for name, own in functions.items():
            same = SamplingParams(
                max_tokens=12, temperature=1.0, seed=3, logits_processors=[lambda prompt, *rest, own=own: own(3, *rest)]
            )
            expected = engine.generate(PROMPT, same).token_ids
            assert engine.generate(PROMPT, params.replace(**{name: 3})).token_ids == expected != plain, name
        engine.generate(PROMPT, params.replace(flavour=3), speculation=True)  # each guess is looked at by itself
        with pytest.raises(InvalidParameter, match="apart: cannot go with speculation or a prediction"):
            engine.generate(PROMPT, params.replace(apart=3), speculation=True)
        known = logit_processors.known_on(torch.device("cuda"))
        info = replace(engine.info, device="cuda:0", sampling_parameters=known)
        gpu = RequestValidator(engine.core.config, info, engine.core.loop.clock, engine.core.tokenizer)
        with pytest.raises(InvalidParameter, match="flavour: cannot be had: steps on cuda:0 do not know it"):
            gpu.prepare([5], params.replace(flavour=3), RequestOptions(), 0.0)
