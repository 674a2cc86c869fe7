"""Regular expressions out of somebody's adapter_config.json, matched within a time limit.

PEFT matches with `re`, which has no limit and keeps the interpreter to itself: a pattern like `(a|a)*b` would stop
the whole process. `regex` reads the same patterns, lets other threads run and gives up in time.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from asyncengine.errors import AdapterError

if TYPE_CHECKING:
    import regex  # type: ignore[import-untyped]

MAX_PATTERN_CHARS = 4096
SECONDS = 5.0
"""For all matches of one adapter together."""
MAX_REPEATS = 10_000
"""Product of all counts `{n}` in one pattern: `regex` unrolls them."""

_BRACES = re.compile(r"\{([^{}]*)\}")
_COUNT = re.compile(r"\d{1,5}(,\d{0,5})?|,\d{1,5}")


class Patterns:
    """Matches the patterns of one configuration. Every method raises `AdapterError` naming `field`."""

    def __init__(self, seconds: float = SECONDS) -> None:
        self._deadline = time.monotonic() + seconds
        self._compiled: dict[str, regex.Pattern[str]] = {}

    def fullmatch(self, pattern: str, text: str, field: str) -> bool:
        return self._match(pattern, text, field) is not None

    def first_key(self, keys: Iterable[str], module: str, field: str) -> str | None:
        """The first of `keys` that means `module`: as a pattern for its whole path, or for what follows a dot."""
        return next((key for key in keys if self.fullmatch(rf"(?:.*\.)?(?:{key})", module, field)), None)

    def layer_index(self, layers_patterns: list[str], module: str) -> int | None:
        """The number of the layer `module` is in: the first number in its path, after one of `layers_patterns`."""
        if not layers_patterns:
            return _number(self._match(r".*?\.[^.]*\.(?P<index>\d+)\..*", module, "layers_to_transform"))
        for pattern in layers_patterns:
            found = self._match(rf"(?:|.*?\.)(?:{pattern})\.(?P<index>\d+)\..*", module, "layers_pattern")
            if found is not None:
                return _number(found)
        return None

    def _match(self, pattern: str, text: str, field: str) -> regex.Match[str] | None:
        if len(pattern) > MAX_PATTERN_CHARS:
            raise AdapterError(field, f"has a pattern of {len(pattern)} characters, over {MAX_PATTERN_CHARS}")
        import regex  # takes a tenth of a second, and most engines have no adapter with a pattern

        left = self._deadline - time.monotonic()
        try:
            compiled = self._compiled.get(pattern)
            if compiled is None:
                compiled = self._compiled[pattern] = _compile(pattern, field)
            if left <= 0:
                raise TimeoutError
            return compiled.fullmatch(text, timeout=left, concurrent=True)
        except TimeoutError:
            raise AdapterError(field, "takes too long to match; write a simpler pattern", pattern) from None
        except (re.error, regex.error, RecursionError, OverflowError, MemoryError, ValueError, IndexError) as error:
            raise AdapterError(field, f"is not a regular expression ({error})", pattern) from None


def _compile(pattern: str, field: str) -> regex.Pattern[str]:
    """Only what `re` takes as well, with the same meaning: `regex` knows more (recursion, fuzzy counts)."""
    counts = _BRACES.findall(pattern)
    if any(_COUNT.fullmatch(count) is None for count in counts):
        raise AdapterError(field, "has braces that are no count", pattern)
    sizes = [max([1, *(int(number) for number in count.split(",") if number)]) for count in counts]
    if math.prod(sizes) > MAX_REPEATS:
        raise AdapterError(field, f"repeats more than {MAX_REPEATS} times in all", pattern)
    re.compile(pattern)
    import regex

    return regex.compile(pattern)


def _number(found: regex.Match[str] | None) -> int | None:
    return None if found is None else int(found["index"][:9])
