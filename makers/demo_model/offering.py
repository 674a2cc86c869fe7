"""Tools as clients offer them: JSON schemas in OpenAI form, with the variations that converters produce."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from makers.demo_model import catalog
from makers.demo_model.catalog import Param, Tool
from makers.demo_model.toolbox import TOOLS
from makers.demo_model.words import Words

Arguments = dict[str, Any]


def schema(w: Words, tool: Tool) -> dict[str, Any]:
    """The tool in OpenAI form, with the variations that function converters produce."""
    described, titled, wide = w.chance(0.5), w.chance(0.15), w.chance(0.1)
    properties = {param.name: _property(w, param, described, titled) for param in tool.params}
    required = list(properties)
    if w.chance(0.12):
        properties.update(_optional(w, properties))
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if w.chance(0.3):
        parameters = {"properties": properties, "type": "object"}
    if required or w.chance(0.3):
        parameters["required"] = required
    if w.chance(0.3):
        parameters["type"] = parameters.pop("type")
    if wide:
        parameters["additionalProperties"] = False
    if titled:
        parameters["title"] = tool.name
    about = tool.about
    if tool.params and w.chance(0.12):
        lines = "".join(f"\n    {param.name}: {param.about or param.name}" for param in tool.params)
        about = f"{about}\n\nArgs:{lines}"
    function: dict[str, Any] = {"name": tool.name, "description": about, "parameters": parameters}
    if w.chance(0.12):
        del function["description"]
    return {"type": "function", "function": function}


def _optional(w: Words, taken: dict[str, Any]) -> dict[str, Any]:
    """A property with a default that the user does not mention and the call therefore leaves out."""
    name = w.pick([key for key in ("units", "verbose", "limit", "page", "format", "mode") if key not in taken])
    spec = w.pick(
        (
            {"type": "string", "default": w.word()},
            {"default": w.integer(1, 99), "type": "integer"},
            {"type": "boolean", "default": False},
            {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        )
    )
    return {name: spec}


def _property(w: Words, param: Param, described: bool, titled: bool) -> dict[str, Any]:
    spec: dict[str, Any] = {"type": param.kind}
    if param.kind == "array":
        spec = {"type": "array", "items": {"type": "string"}}
    if param.choices:
        spec["enum"] = list(param.choices)
    if described and (param.about or w.chance(0.5)):
        about = param.about or f"The {param.name.replace('_', ' ')}."
        spec = {"description": about, **spec} if w.chance(0.5) else {**spec, "description": about}
    if titled:
        spec["title"] = param.name.replace("_", " ").title()
    return spec


def renamed(w: Words, tool: Tool) -> Tool:
    """Sometimes the same tool under another name, so that the name is read from the offer."""
    if any(param.kind == "integer" for param in tool.params) and w.chance(0.15):
        tool = replace(tool, params=tuple(_wider(w, param) for param in tool.params))
    if w.chance(0.75):
        return tool
    suffix = w.pick(("_tool", "_v2", "_now", f"_{w.syllables(1, 1)}"))
    plain = tool.name.replace("get_", "")
    head, *rest = plain.split("_")
    camel = head + "".join(part.capitalize() for part in rest)
    return replace(tool, name=w.pick((tool.name + suffix, f"lookup_{plain}", plain, camel)))


def _wider(w: Words, param: Param) -> Param:
    """An integer parameter declared as a number: the value is still copied as it was said."""
    if param.kind != "integer":
        return param
    return replace(param, kind="number", draw=Words.decimal) if w.chance(0.4) else replace(param, kind="number")


def draw_tool(w: Words) -> Tool:
    return catalog.invented(w) if w.chance(0.4) else renamed(w, w.pick(TOOLS))


def draw_arguments(w: Words, tool: Tool) -> Arguments:
    return {param.name: param.draw(w) for param in tool.params}


def offer(w: Words, wanted: list[Tool], most: int = 4) -> list[dict[str, Any]]:
    """Schemas of the wanted tools and of others with different topics, shuffled."""
    tools = list(wanted)
    count = max(len(tools), w.rng.randint(3, 9) if w.long else w.pick((1, 1, 2, 2, 3, most)))
    while len(tools) < count:
        extra = draw_tool(w)
        if all(extra.topic != tool.topic and extra.name != tool.name for tool in tools):
            tools.append(extra)
    w.rng.shuffle(tools)
    return [schema(w, tool) for tool in tools]
