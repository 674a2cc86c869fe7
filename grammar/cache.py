"""Compiled grammars by key, bounded in bytes; and the errors that will not go away by trying again."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from asyncengine.errors import GrammarError

if TYPE_CHECKING:
    from asyncengine.grammar.llguidance_backend import LlgTemplate

MAX_ERRORS = 256


class TemplateCache:
    """Least recently used goes first. Not thread-safe: the service holds its lock.

    Only errors that the grammar itself causes are remembered, never timeouts and never a full queue: trying those
    again may succeed (SGLang once remembered a timeout as "invalid" for ever).
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._templates: OrderedDict[str, tuple[LlgTemplate, int]] = OrderedDict()
        self._errors: OrderedDict[str, GrammarError] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._templates)

    def get(self, key: str) -> LlgTemplate | GrammarError | None:
        """The template, or the error that compiling it gives each time."""
        found = self._templates.get(key)
        if found is not None:
            self._templates.move_to_end(key)
            return found[0]
        return self._errors.get(key)

    def put(self, key: str, template: LlgTemplate) -> None:
        """Keep `template`, unless it alone is larger than the cache."""
        self.drop(key)
        size = template.nbytes
        if size > self._max_bytes:
            return
        self._templates[key] = (template, size)
        self.nbytes += size
        while self.nbytes > self._max_bytes:
            _, (_, size) = self._templates.popitem(last=False)
            self.nbytes -= size

    def put_error(self, key: str, error: GrammarError) -> None:
        self._errors[key] = error
        self._errors.move_to_end(key)
        while len(self._errors) > MAX_ERRORS:
            self._errors.popitem(last=False)

    def drop(self, key: str) -> None:
        """Forget a template (it broke). Idempotent."""
        found = self._templates.pop(key, None)
        if found is not None:
            self.nbytes -= found[1]
