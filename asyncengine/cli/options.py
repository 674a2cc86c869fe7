"""Command-line flags made from the fields of a settings dataclass: each setting is declared once, in its class."""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from asyncengine.config import CHOICES, EngineConfig
from asyncengine.errors import ContextLengthExceeded
from asyncengine.outputs import Completion
from asyncengine.sampling_params import SamplingParams

T = TypeVar("T")

ENGINE_FIELDS = tuple(f.name for f in fields(EngineConfig) if f.name not in ("show_progress", "adapters"))
"""Adapters have a flag of their own, `--adapter NAME=PATH`."""
MOST_TOKENS = 1024
"""Tokens of an answer where no flag says: one without an end, as of `--regex 'a*'`, would go on to the context's."""
SAMPLING_FIELDS = (
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos",
)  # fmt: skip


def add_flags(
    parser: argparse.ArgumentParser, title: str, settings: type, names: Sequence[str], **docs_here: str
) -> None:
    """A group of flags, one for each named field, with `docs_here` for those whose default is a command's own. A flag
    that is not given leaves the field's default alone."""
    group = parser.add_argument_group(title)
    docs = {**field_docs(settings), **docs_here}
    hints = get_type_hints(settings)
    defaults = {f.name: f.default for f in fields(settings)}
    for name in names:
        text = docs.get(name, "")
        if isinstance(defaults[name], (bool, int, float, str)):
            text = f"{text} [{defaults[name]}]".lstrip()
        group.add_argument(
            "--" + name.replace("_", "-"),
            dest=name,
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_how_to_parse(name, hints[name]),
        )


def given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The named settings that were on the command line."""
    return {name: value for name, value in vars(args).items() if name in names}


def sampling_params(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """Raises `InvalidParameter` naming the field."""
    return SamplingParams(**{**defaults, **given(args, SAMPLING_FIELDS)})


def start_limited(params: SamplingParams, start: Callable[[SamplingParams], T]) -> T:
    """`start`, with at most `MOST_TOKENS` if no flag says how many; where the context has no room for so many, with all
    that it has room for."""
    if params.max_tokens is None:
        with contextlib.suppress(ContextLengthExceeded):
            return start(params.replace(max_tokens=max(MOST_TOKENS, params.min_tokens)))
    return start(params)


def say_stopped(completion: Completion, context: int) -> None:
    """On stderr, that an answer was ended before its end. `context`: tokens that the model reads."""
    lengths = [len(sample.token_ids) for sample in completion.samples if sample.finish_reason == "length"]
    if lengths:
        full = completion.usage.prompt_tokens + max(lengths) >= context
        why = f"the context of {context} is full" if full else "--max-tokens"
        print(f"stopped after {max(lengths)} tokens ({why})", file=sys.stderr)


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """Raises `InvalidParameter` naming the field."""
    return EngineConfig(**{**defaults, **given(args, ENGINE_FIELDS)})


_MOST_CHOICES = 9
"""Names that a flag lists; more stand in the documentation."""


def _how_to_parse(name: str, hint: Any) -> dict[str, Any]:
    """argparse keywords for a field's type. Ranges are checked by the settings class, which names the field."""
    options = [kind for kind in _members(hint) if kind is not type(None)]
    choices = get_args(options[0]) if get_origin(options[0]) is Literal else CHOICES.get(name, ())
    if 0 < len(choices) <= _MOST_CHOICES:
        return {"metavar": "{" + ",".join(choices) + "}"}
    if options == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    if str in options:
        return {"metavar": "TEXT"}
    if get_origin(options[0]) is Sequence:
        (item,) = get_args(options[0])
        return {"action": "append", "type": item, "metavar": item.__name__.upper()}
    if get_origin(options[0]) is tuple:
        return {"type": _numbers, "metavar": "FLOAT,..."}
    return {"type": options[0], "metavar": options[0].__name__.upper()}


def _numbers(text: str) -> tuple[float, ...]:
    """Raises `ArgumentTypeError`."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text!r}") from None


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def field_docs(settings: type) -> dict[str, str]:
    """The string literal under each field of a class, on one line. Empty where the source is not at hand."""
    try:
        (definition,) = ast.parse(inspect.getsource(settings)).body
    except (OSError, SyntaxError):
        return {}
    assert isinstance(definition, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, below in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            docs[node.target.id] = " ".join(below.value.value.split())
    return docs
