if __name__ != "asyncengine.grammar":
    raise ImportError("import asyncengine.grammar, not grammar")

from asyncengine.grammar.limits import check_limits
from asyncengine.grammar.schemas import as_meant, pydantic_schema, take_formats
from asyncengine.grammar.spec import Grammar

__all__ = ["Grammar", "as_meant", "check_limits", "pydantic_schema", "take_formats"]
