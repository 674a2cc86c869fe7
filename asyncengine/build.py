"""For applications' own tests: `wire` makes an engine of any executor (docs/howto/testing_your_app.md)."""

from asyncengine.assembly.wiring import wire

__all__ = ["wire"]
