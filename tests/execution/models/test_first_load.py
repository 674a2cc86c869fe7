"""The needs of a load are known: no kernel is compiled that was not expected, and nothing slow is imported."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from support import forked
from support.tiny_models import FAMILIES

from asyncengine.demo import MODEL_PATH
from asyncengine.kernels import cpu
from asyncengine.kernels.cpu import compiler_missing

if compiler_missing(torch.float32, torch.device("cpu")) is not None:
    pytest.skip("no compiler", allow_module_level=True)

_SLOW = (
    "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "torch._inductor",
    "transformers.activations", "transformers.modeling_utils", "transformers.generation.continuous_batching",
    "transformers.integrations.hub_kernels",
    "transformers.models.llama.modeling_llama", "transformers.models.qwen3.configuration_qwen3", "outlines",
    "langchain_core", "llama_index", "jinja2.ext.debug", "rich.progress", "peft",
)  # fmt: skip
_SOURCE = "".join(file.read_text(encoding="utf-8") for file in Path(cpu.__file__).parent.glob("*.py"))
_RARE = sorted(set(re.findall(r"call_rare\(\s*(\w+),", _SOURCE)))
"""Kernels that are called by address and compiled with no caller of theirs: a model that needs one must say so."""
_ASKED = "asked for "
"""Prefix of names of functions that Python passes on by address."""
_LOAD = f"""
import json, sys
from numba.core.dispatcher import Dispatcher
called, compile = [], Dispatcher._compile_for_args
def noted(self, *args, **kwargs):
    known = set(self.overloads)
    found = compile(self, *args, **kwargs)
    called.append((self, set(self.overloads) - known))
    return found
Dispatcher._compile_for_args = noted
import asyncengine.kernels.compile_ahead as compile_ahead
import asyncengine.kernels.cpu.calls as calls
by_address, code_of = set(), calls._code_of
def asked(name):
    by_address.add(name)
    return code_of(name)
calls._code_of = asked
asked_for, address_of = [], calls.address_of
def address(name):
    asked_for.append(name)
    return address_of(name)
calls.address_of = address
expected = []
def start(self, names, later=()):
    expected.extend(names)
    if sys.argv[3:]:  # as if all that a first answer needs were in the cache
        self.kept = names
    else:
        expected.extend(later)
compile_ahead.CompileAhead.start = start
from asyncengine import Engine, SamplingParams
with Engine.from_pretrained(sys.argv[1], **json.loads(sys.argv[2])) as engine:
    engine.generate([1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0))
loaded = [name for name in {_SLOW!r} if name in sys.modules]
found = []
for function, added in called:
    module = sys.modules[function.py_func.__module__]
    name = next(name for name, value in vars(module).items() if value is function)
    found += [f"{{module.__name__}}:{{name}}:({{', '.join(map(str, types))}})" for types in added]
found += [*sorted(by_address), *(f"{_ASKED}{{name}}" for name in asked_for)]
print(json.dumps([found, expected, loaded]))
"""
_SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 1000,
    "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip
_TEAM = "asyncengine.kernels.cpu.team_loops:"
_ROUNDING = ("asyncengine.kernels.cpu.quantize:_to_", "asyncengine.kernels.cpu.quantized_panels:_pack_")


_ENCODE = """
from asyncengine.config import EngineConfig
from asyncengine.execution.models.loading import load_encoder
import torch
config = EngineConfig(**json.loads(sys.argv[2]), show_progress=False)
loaded = load_encoder(sys.argv[1], config, ahead=compile_ahead.CompileAhead(0))
with torch.inference_mode():
    loaded.model.classify(loaded.model.forward(torch.arange(1, 80), [70, 9]), [70, 9])
"""
_GENERATE = _LOAD[_LOAD.index("from asyncengine import Engine") : _LOAD.index("loaded = [")]


def load(model: str, *more: str, **settings: object) -> tuple[list[str], list[str], list[str]]:
    """(kernels that Python called, those that were expected, slow modules) of a load in a process of its own."""
    return run_in_process(_LOAD, model, settings, *more)


def run_in_process(
    code: str, model: str, settings: dict[str, object], *more: str
) -> tuple[list[str], list[str], list[str]]:
    output = forked.run(code, model, json.dumps(settings), *more)
    called, expected, loaded = json.loads(output.splitlines()[-1])
    return called, expected, loaded


def unexpected(called: list[str], expected: list[str]) -> list[str]:
    """Names of unexpected kernels among those compiled on the way. The team's loops and the rounding of weights are
    needed before anything else; what is called by address, unless rarely, is compiled with its callers."""
    asked = {name.removeprefix(_ASKED) for name in called if name.startswith(_ASKED)}
    others = {name for name in called if not name.startswith(_ASKED)} - set(expected)
    with_callers = {name for name in others - asked if ":void(" in name and name.split(":")[1] not in _RARE}
    return sorted(name for name in others - with_callers if not name.startswith((_TEAM, *_ROUNDING)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_first_answer_needs_no_more_than_a_load_waits_for(dtype: str) -> None:
    called, needed, loaded = load(str(MODEL_PATH), "only what is needed", dtype=dtype)
    assert loaded == []
    assert unexpected(called, needed) == []
    assert len(called) > 8
    assert not any("top_p" in name or "activate" in name for name in needed)  # it takes the largest, and is gated


def test_others_are_expected_that_nobody_waits_for() -> None:
    """All kernels that are called are expected, here of a model whose dtype is not given."""
    called, expected, loaded = load(str(MODEL_PATH))
    assert loaded == []
    assert unexpected(called, expected) == []
    assert any("top_p" in name for name in expected)


def test_what_is_rarely_called_is_known() -> None:
    assert {"join", "top_p_threshold"} <= set(_RARE)


def of_shape(**fields: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps(_SHAPE | fields))


def of_family(name: str) -> Callable[[Path], object]:
    return lambda folder: FAMILIES[name]().save_pretrained(folder)


class Case(NamedTuple):
    """A model, settings beside its dtype, and functions among its kernels."""

    write: Callable[[Path], object]
    functions: frozenset[str] = frozenset()
    settings: Mapping[str, object] = MappingProxyType({})
    needed: bool = False
    """True if only what a first answer needs is looked at."""


_MIXTURE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_ROUTED = frozenset({"run_experts", "_route_few"})
_INT8 = {"quantization": "int8"}
CASES = {
    "short steps of them": Case(
        of_family("falcon-h1"), frozenset({"scale_columns.share", "add_beside.share"}), needed=True
    ),
    "inputs of layers, normed values, scaled layers": Case(
        of_family("gemma4"), frozenset({"copy_columns", "scale_columns", "add_beside"}), _INT8, needed=True
    ),
    "scaled inputs of experts": Case(of_family("llama4"), frozenset({"multiply_rows"}), _INT8, needed=True),
    "an activation that few have": Case(
        of_shape(hidden_act="gelu_pytorch_tanh"), frozenset({"gate_by_gelu_tanh"}), needed=True
    ),
    "a mixture with a shared expert": Case(
        of_shape(**_MIXTURE, model_type="qwen2_moe", shared_expert_intermediate_size=128), _ROUTED
    ),
    "an exact mixture": Case(
        of_shape(**_MIXTURE, model_type="glm4_moe", n_routed_experts=8, n_group=1, topk_group=1), _ROUTED,
        {"quantization": "int4"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_kernels_of(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.write(tmp_path)
    settings = {"dtype": "bfloat16", **case.settings}
    more = ["only what is needed"] * case.needed
    called, expected, loaded = load(str(tmp_path), *more, load_format="dummy", max_model_len=128, **settings)
    assert loaded == []
    assert unexpected(called, expected) == []
    assert case.functions <= {kernel.split(":")[1] for kernel in (*called, *(expected if case.needed else ()))}


@pytest.mark.parametrize(
    ("family", "settings"),
    [("modernbert", {"dtype": "bfloat16"}), ("eurobert", {"dtype": "float32", "quantization": "int8"})],
)
def test_kernels_of_encoders(family: str, settings: dict[str, object], tmp_path: Path) -> None:
    sizes = {name: size for name, size in _SHAPE.items() if name not in ("tie_word_embeddings", "head_dim")}
    kinds = {"architectures": ["ForSequenceClassification"], "model_type": family, "pad_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(sizes | kinds))
    called, expected, _ = run_in_process(
        _LOAD.replace(_GENERATE, _ENCODE), str(tmp_path), settings | {"load_format": "dummy"}
    )
    assert unexpected(called, expected) == []
    assert any(":attend:" in name for name in called)
