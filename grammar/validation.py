"""Checking a finished text against its schema, where the grammar could not enforce all of it."""

from __future__ import annotations

import json
from collections.abc import Callable

from asyncengine.grammar.spec import Grammar

MAX_MESSAGE = 500


def text_check(grammar: Grammar | None) -> Callable[[str], str | None] | None:
    """The check of a text that was generated under `grammar`; None if there is nothing left to check.

    The check returns what the text breaks, or None. It runs with the consumer, after the last chunk.
    """
    if grammar is None or grammar.kind != "json_schema" or grammar.unsupported != "validate":
        return None
    schema = json.loads(grammar.text)

    def check(text: str) -> str | None:
        from jsonschema.exceptions import best_match
        from jsonschema.validators import validator_for

        try:
            instance = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"not JSON: {error}"
        kind = validator_for(schema)
        try:
            worst = best_match(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(instance))
        except Exception as error:  # the schema itself may be wrong in ways nobody could check before
            return f"the schema cannot be checked: {error}"[:MAX_MESSAGE]
        return None if worst is None else f"{worst.json_path}: {worst.message}"[:MAX_MESSAGE]

    return check
