from support.checkpoints import checkpoint, one_thread

__all__ = ["checkpoint", "one_thread"]
