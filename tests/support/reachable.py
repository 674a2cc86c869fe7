"""All tensors that an object of ours holds, however deep."""

from __future__ import annotations

from typing import Any

import torch


def tensors_in(root: Any) -> list[torch.Tensor]:
    """Each once, through attributes of our own and torch's modules and through containers; not into functions."""
    found: dict[int, torch.Tensor] = {}
    seen: dict[int, Any] = {}
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen[id(each)] = each
        if isinstance(each, torch.Tensor):
            found[id(each)] = each
        elif isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, (list, tuple)):
            waiting += each
        elif isinstance(each, torch.nn.Module) or type(each).__module__.startswith("asyncengine."):
            waiting += getattr(each, "__dict__", {}).values()
            waiting += [getattr(each, name, None) for name in getattr(type(each), "__slots__", ())]
    return list(found.values())
