"""The `asyncengine` command as a function: the public name of `asyncengine.integrations.cli`."""

from asyncengine.integrations.cli.main import main

__all__ = ["main"]
