"""Formats in which families write tool calls, and marks around what models think: the tables of families.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from asyncengine.grammar.chat.formats import Reasoning, ToolFormat
from asyncengine.grammar.schema.arguments import Members


def _frozen(value: Any) -> Any:
    """`value` with tuples for lists."""
    if isinstance(value, dict):
        return {name: _frozen(inner) for name, inner in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


TABLES = _frozen(tomllib.loads((resources.files(__package__) / "families.toml").read_text(encoding="utf-8")))


def _format(name: str, table: Mapping[str, Any]) -> ToolFormat:
    members = Members(**table["members"]) if "members" in table else None
    return ToolFormat(**{"family": name, **table, "members": members})


TOOL_FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {name: _format(name, table) for name, table in TABLES["formats"].items()}
)
"""The usual text of each family. What a model's own template writes goes before it: `detect.find_tool_format`."""
REASONING_MARKERS = tuple(Reasoning(**table) for table in TABLES["reasoning"])
"""Markers in use; of several that fit a template, the first counts."""
