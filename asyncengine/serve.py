"""The engine over HTTP: the public name of `asyncengine.integrations.http`."""

from asyncengine.integrations.http import app

__all__ = ["app"]
