"""Command-line flags made from the fields of a settings dataclass: each setting is declared once, in its class."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields
from itertools import pairwise
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from asyncengine.checks import Settings
from asyncengine.config import EngineConfig
from asyncengine.errors import ContextLengthExceeded
from asyncengine.outputs import Completion
from asyncengine.sampling_params import OFFERED, SamplingParams

T = TypeVar("T")

ENGINE_FIELDS = tuple(f.name for f in fields(EngineConfig) if f.name not in ("show_progress", "adapters"))
"""Adapters have a flag of their own, `--adapter NAME=PATH`."""
MOST_TOKENS = 1024
"""Most tokens of an answer without `--max-tokens`: one without an end (`--regex 'a*'`) would fill the context."""
SAMPLING_FIELDS = tuple(name for name, marks in SamplingParams.declared().items() if OFFERED in marks)


def add_flags(parser: argparse.ArgumentParser, title: str, settings: type[Settings], names: Sequence[str]) -> None:
    """Add a group of flags, one for each named field. A flag that is not given leaves the field's default alone."""
    group = parser.add_argument_group(title)
    hints, checks, docs = get_type_hints(settings), settings.checks(), field_docs(settings)
    limit = f"[{MOST_TOKENS}, for some answers have no end; less where the context is shorter]"
    docs = {**docs, "max_tokens": f"Most tokens to generate {limit}"}
    for setting in [item for item in fields(settings) if item.name in names]:
        text = docs.get(setting.name, "")
        if isinstance(setting.default, (bool, int, float, str)):
            text = f"{text} [{setting.default}]".lstrip()
        how = _how_to_parse(hints[setting.name], getattr(checks[setting.name][0], "keywords", {}).get("choices", ()))
        how |= {"dest": setting.name, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        group.add_argument("--" + setting.name.replace("_", "-"), **how)


def given(args: argparse.Namespace, settings: type[Settings]) -> dict[str, Any]:
    """The fields of a settings class that were given on the command line."""
    return {name: value for name, value in vars(args).items() if name in settings.__dataclass_fields__}


def sampling_params(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """Sampling parameters of the flags, over `defaults`. Raises `InvalidParameter` naming the field."""
    return SamplingParams(**{**defaults, **given(args, SamplingParams)})


def start_limited(params: SamplingParams, start: Callable[[SamplingParams], T]) -> T:
    """Call `start`, with at most `MOST_TOKENS` if no flag limits tokens; with no limit but the context if that has no
    room for as many."""
    if params.max_tokens is None:
        with contextlib.suppress(ContextLengthExceeded):
            return start(params.replace(max_tokens=max(MOST_TOKENS, params.min_tokens)))
    return start(params)


def say_stopped(completion: Completion, context: int) -> None:
    """Tell on stderr that an answer reached its limit of tokens. `context`: the model's context length in tokens."""
    lengths = [len(sample.token_ids) for sample in completion.samples if sample.finish_reason == "length"]
    if lengths:
        full = completion.usage.prompt_tokens + max(lengths) >= context
        why = f"the context of {context} is full" if full else "--max-tokens"
        print(f"stopped after {max(lengths)} tokens ({why})", file=sys.stderr)


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The engine's settings of the flags, over `defaults`. Raises `InvalidParameter` naming the field."""
    return EngineConfig(**{**defaults, **given(args, EngineConfig)})


_MOST_CHOICES = 9
"""Names that a flag lists; more stand in the documentation."""


def _how_to_parse(hint: Any, choices: Collection[str]) -> dict[str, Any]:
    """argparse keywords for a field's type. The settings class checks a flag's value."""
    types = [type_ for type_ in (get_args(hint) or (hint,)) if type_ is not NoneType]
    if 0 < len(choices) <= _MOST_CHOICES:
        return {"metavar": "{" + ",".join(choices) + "}"}
    if types == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is Sequence:
        return {"action": "append", **_how_to_parse(types[0], ())}
    if str in types:
        return {"metavar": "TEXT"}
    return {"type": literal, "metavar": "FLOAT,..." if get_origin(types[0]) is tuple else types[0].__name__.upper()}


def literal(text: str) -> Any:
    """A flag's value as Python reads it, such as a number, or several with commas between them.

    What Python cannot read stays a text, for the check of its field to refuse.
    """
    with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(text)
    return text


def field_docs(settings: type) -> dict[str, str]:
    """The string literal under each field of a class, its bases' included, on one line.

    Empty where the source is not at hand.
    """
    return {name: text for base in settings.__mro__[-2::-1] for name, text in _own_docs(base).items()}


@functools.cache
def _own_docs(owner: type) -> dict[str, str]:
    docs: dict[str, str] = {}
    try:
        (definition,) = ast.parse(inspect.getsource(owner)).body
    except (OSError, SyntaxError):
        return docs
    assert isinstance(definition, ast.ClassDef)
    for pair in pairwise(definition.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(value=ast.Constant(str(text))):
                docs[name] = " ".join(text.split())
    return docs
