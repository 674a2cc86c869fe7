"""Settings of grammars and tools: a group of `EngineConfig`'s fields, and all that the grammar service is told."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from asyncengine.checks import CacheMemory, Positive, Seconds, Settings, Threads, integer_in, one_of

_TABLES = (Path(__file__).parent / "chat" / "families.toml").read_text(encoding="utf-8")
TOOL_FORMATS = ("auto", *re.findall(r"^\[formats\.(\w+)\]$", _TABLES, re.MULTILINE))
"""Names of the formats: not read as the tables that they are, which would take longer than all else in the settings."""


@dataclass(frozen=True, kw_only=True)
class GrammarSettings(Settings):
    """Grammars and tools."""

    grammar_backend: Annotated[str, one_of(("llguidance", "none"))] = "llguidance"
    """The library that compiles grammars; "none": refuse grammars and save the time and memory that they need."""
    grammar_timeout: Seconds = 10.0
    """Seconds a request waits for its grammar to compile, from its arrival; then the work is given up."""
    grammar_workers: Threads = 2
    """Threads that compile grammars."""
    grammar_cache_memory: CacheMemory = "256MiB"
    """Bytes of compiled grammars kept for reuse. None: none."""
    max_pending_grammars: Positive = 1024
    """Grammars waiting to be compiled; more are refused with QueueFull."""
    max_grammar_bytes: Positive = 1024 * 1024
    """Size of one grammar's text."""
    max_grammar_depth: Annotated[int, integer_in(1, 4096)] = 64
    """Nesting of one grammar's schema."""
    jump_forward: bool | None = None
    """Append tokens that a grammar forces without sampling them, and compute them together in the next step. A step
    that is launched by then has computed the request's row in vain. None: where a request is in one step at a time."""
    tool_format: Annotated[str, one_of(TOOL_FORMATS)] = "auto"
    """The form in which the model writes tool calls, such as "hermes" or "qwen3_coder" (the how-to on tools has the
    names); "auto" reads it off the template."""
