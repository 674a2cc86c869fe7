if __name__ != "asyncengine.grammar":
    raise ImportError("import asyncengine.grammar, not grammar")

from asyncengine.grammar.limits import check_limits
from asyncengine.grammar.spec import Grammar

__all__ = ["Grammar", "check_limits"]
