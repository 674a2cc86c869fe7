"""Bugs that are planted to see whether a fuzz notices them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Plant = Callable[[pytest.MonkeyPatch], None]


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Plant]:
    """A plant that puts the decorated function in place of `owner.name`, which it gets as its first argument."""

    def made(broken: Callable[..., Any]) -> Plant:
        def plant(patch: pytest.MonkeyPatch) -> None:
            real = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **more: broken(real, *args, **more))

        plant.__name__, plant.__doc__ = broken.__name__, broken.__doc__
        return plant

    return made
