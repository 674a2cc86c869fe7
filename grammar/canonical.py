"""One spelling per JSON value: no insignificant whitespace, keys in the order given, hostile input refused by name."""

from __future__ import annotations

import json
from typing import Any

from asyncengine.errors import GrammarError, GrammarTooLarge

MAX_CONSTRUCT_DEPTH = 256
"""Deepest nesting that is looked at all. Well above what `check_limits` lets through, below Python's own recursion."""
MAX_CONSTRUCT_SIZE = 16 << 20
"""Most characters that are looked at all, where each value counts as `NODE_SIZE` more."""
NODE_SIZE = 8


def canonical_json(value: Any) -> str:
    """The canonical text of a JSON value (dict, list, tuple, str, int, float, bool, None).

    Raises `GrammarError` for anything else (other keys than str, NaN, infinity, NUL, lone surrogates) and
    `GrammarTooLarge` where the value is cyclic, deeply nested or huge. No recursion, so no `RecursionError`.
    """
    _check(value)
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError) as error:
        raise GrammarError("grammar", f"must be JSON: {str(error)[:80]}") from None
    return text


def parse_json(text: str) -> Any:
    """The value of a JSON text. Raises as `canonical_json`."""
    if len(text) > MAX_CONSTRUCT_SIZE:
        raise GrammarTooLarge("grammar", f"must not exceed {MAX_CONSTRUCT_SIZE} characters", len(text))
    try:
        return json.loads(text)
    except RecursionError:
        raise GrammarTooLarge("grammar", f"must not nest deeper than {MAX_CONSTRUCT_DEPTH} levels") from None
    except ValueError as error:
        raise GrammarError("grammar", f"is not JSON text: {str(error)[:80]}") from None


def _check(value: Any) -> None:
    """Walk all of `value` with a stack of our own. A cycle shows as depth, shared parts as size."""
    stack = [(value, 1)]
    size = 0
    while stack:
        node, depth = stack.pop()
        size += NODE_SIZE
        if isinstance(node, str):
            size += len(node)
        elif isinstance(node, dict):
            for key in node:
                if not isinstance(key, str):
                    raise GrammarError("grammar", "keys of JSON objects must be str", key)
                size += len(key)
            stack.extend([(child, depth + 1) for child in node.values()])
        elif isinstance(node, (list, tuple)):
            stack.extend([(child, depth + 1) for child in node])
        elif node is not None and not isinstance(node, (bool, int, float)):
            raise GrammarError("grammar", f"must be JSON, not {type(node).__name__}")
        if depth > MAX_CONSTRUCT_DEPTH:
            raise GrammarTooLarge("grammar", f"must not nest deeper than {MAX_CONSTRUCT_DEPTH} levels (or is cyclic)")
        if size > MAX_CONSTRUCT_SIZE or len(stack) * NODE_SIZE > MAX_CONSTRUCT_SIZE:
            raise GrammarTooLarge("grammar", f"must not exceed {MAX_CONSTRUCT_SIZE} characters")
