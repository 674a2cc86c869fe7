"""For tests of programs that use an engine, and of the engine: a fake chat, a fake model, a manual clock, replay, leak
checks."""

from asyncengine.testing.clock import ManualClock
from asyncengine.testing.fake_chat import FakeChat
from asyncengine.testing.fake_runner import FakeExecutor, FakeModel
from asyncengine.testing.leaks import assert_nothing_held
from asyncengine.testing.replay import Recording, replay

__all__ = ["FakeChat", "FakeExecutor", "FakeModel", "ManualClock", "Recording", "assert_nothing_held", "replay"]
