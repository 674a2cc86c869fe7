from support.checkpoints import checkpoint, make_runner, one_thread

__all__ = ["checkpoint", "make_runner", "one_thread"]
