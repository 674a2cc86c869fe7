"""One specification per request: the same object from validation to row, and nobody copies what stands in it.

So a new option of requests concerns two files: the one that declares and checks it, and the
one that uses it.
"""

from __future__ import annotations

import ast
from dataclasses import FrozenInstanceError, dataclass, fields
from pathlib import Path
from typing import Annotated

import pytest
from layout.test_layout import room, sources
from support.fake_engine import greedy, make_core

from asyncengine.engine.validation import PreparedRequest
from asyncengine.options import ChatKeywords, ChatRequest, RequestKeywords, RequestOptions
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import LOOP, SamplingParams
from asyncengine.step import Row

ALONG_THE_WAY = ("engine", "scheduler", "execution.runner", "step", "stream", "async_engine", "sync_engine", "testing")
"""Rooms that a request goes through."""
DECLARED = {field.name for kind in (RequestSpec, RequestOptions) for field in fields(kind)}
OF_THEIR_OWN = {"ticket", "index"}
"""Keys: messages and outputs name a request, chunks a sample."""


def launched(params: SamplingParams, options: RequestOptions) -> tuple[PreparedRequest, list[Row]]:
    """A request as prepared, and the rows of its first step; every station in between is looked at."""
    told: list[object] = []
    core = make_core(wiring={"recorder": lambda kind, value: told.append(value)})
    prepared = core.prepare([2, 3, 4], params, options)
    core.client.enter_blocking(prepared)
    assembler = core.post(prepared)
    specs = [stream.spec for stream in prepared.streams]
    assert [id(stream.spec) for stream in core.loop.delivery.expected.values()] == [id(spec) for spec in specs]
    core.loop.apply_inbox()
    stations = (
        told,
        [stream.spec for stream in core.loop.delivery.streams.values()],
        [request.spec for request in core.loop.scheduler.requests.values()],
    )
    for found in stations:
        assert [id(spec) for spec in found] == [id(spec) for spec in specs]
    assert assembler.prepared.spec is specs[0]
    batch = core.loop.schedule()
    assert batch is not None
    core.loop.end_all()
    return prepared, list(batch.rows)


def test_a_request_is_one_object_from_validation_to_row() -> None:
    prepared, rows = launched(greedy(4), RequestOptions(priority=3, cache_salt="tenant"))
    assert rows[0].spec is prepared.spec
    with pytest.raises(FrozenInstanceError):
        prepared.spec.max_total = 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        prepared.plan = None  # type: ignore[misc]


def test_samples_share_all_but_who_they_are() -> None:
    prepared, _ = launched(greedy(4, n=3), RequestOptions())
    first, *others = [stream.spec for stream in prepared.streams]
    assert first.group == first.ticket
    for spec in others:
        different = {
            field.name for field in fields(spec) if getattr(spec, field.name) is not getattr(first, field.name)
        }
        assert different == {"ticket", "index", "seed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreParams(SamplingParams):
    flavour: Annotated[str, LOOP] = ""


@dataclass(frozen=True, slots=True)
class MoreOptions(RequestOptions):
    colour: str = ""


def test_what_is_declared_arrives() -> None:
    """A parameter and an option that no file but their own knows stand in the row."""
    _, rows = launched(MoreParams(temperature=0.0, max_tokens=4, flavour="salty"), MoreOptions.of({"colour": "blue"}))
    params, options = rows[0].spec.params, rows[0].spec.options
    assert isinstance(params, MoreParams)
    assert isinstance(options, MoreOptions)
    assert (params.flavour, options.colour) == ("salty", "blue")


def test_keywords_are_typed_as_they_are_declared() -> None:
    options = {field.name for field in fields(RequestOptions)}
    chat = {field.name for field in fields(ChatRequest)} - {"messages"}
    assert set(RequestKeywords.__annotations__) == options
    assert set(ChatKeywords.__annotations__) == options | chat


def declared(node: ast.ClassDef) -> set[str]:
    """Names that instances of a class hold: annotated ones, slots, and what methods give `self`."""
    names = {
        item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    }
    for item in ast.walk(node):
        if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store) and _is_self(item.value):
            names.add(item.attr)
        elif isinstance(item, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__slots__" for t in item.targets
        ):
            names |= {str(text.value) for text in ast.walk(item.value) if isinstance(text, ast.Constant)}
    return names


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def copies_in(path: Path) -> dict[str, list[str]]:
    """Class -> names of the specification's that it declares again."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name != "RequestSpec"]
    found = {node.name: sorted(declared(node) & DECLARED - OF_THEIR_OWN) for node in classes}
    return {name: names for name, names in found.items() if names}


def test_nobody_declares_again_what_the_specification_has() -> None:
    found: dict[str, list[str]] = {}
    for module, path in sources():
        if room(module) in ALONG_THE_WAY:
            found.update(copies_in(path))
    assert found == {"Drain": ["deadline"]}  # the engine's, of no request
