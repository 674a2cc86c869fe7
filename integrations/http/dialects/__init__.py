"""Dialects of HTTP: each reads a request's body into a `Turn` and writes the events of its answer. No I/O in them.

A dialect is a module with `read(fields) -> Turn` and a class `Writer`. It knows no engine, and the engine knows no
dialect; the one to read first is `openai_chat`.
"""

EVENT_STREAM = "text/event-stream; charset=utf-8"
"""Media type of streams whose frames are server-sent events."""
