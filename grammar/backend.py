"""The masks that compiled grammars fill."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]
"""Packed bitmask of allowed tokens, shape [ceil(vocab / 32)], lowest bit first."""
JointFill = Callable[[Mask, Mapping[int, Any]], set[int]]
"""(masks [masks, words], mask -> state) -> those that were filled. `fill` of a state says what is wrong with others."""
