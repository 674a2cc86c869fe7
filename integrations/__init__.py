"""Framework adapters: `asyncengine.integrations.langchain` and `asyncengine.integrations.llama_index`.

Each framework is imported only inside its own adapter; the rest here is what the two adapters share.
"""

if __name__ != "asyncengine.integrations":
    raise ImportError("import asyncengine.integrations, not integrations")
