"""LangChain's standard chat suite with structured output by function_calling."""

from __future__ import annotations

from typing import Any

from .standard_chat import OnTheDemoModel


class TestFunctionCalling(OnTheDemoModel):
    @property
    def structured_output_kwargs(self) -> dict[str, Any]:
        return {"method": "function_calling"}
