from support.checkpoints import checkpoint, make_runner, one_thread
from support.panels import panels

__all__ = ["checkpoint", "make_runner", "one_thread", "panels"]
