if __name__ != "asyncengine.grammar":
    raise ImportError("import asyncengine.grammar, not grammar")
