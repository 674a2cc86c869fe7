from support.checkpoints import checkpoint

__all__ = ["checkpoint"]
