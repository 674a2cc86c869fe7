"""LangChain's standard chat suite with structured output by json_mode."""

from __future__ import annotations

from typing import Any

from .standard_chat import OnTheDemoModel


class TestJSONMode(OnTheDemoModel):
    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "json_mode"}
