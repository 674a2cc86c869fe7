"""The header of a GGUF model's image part, with the sizes that its tensors show."""

from __future__ import annotations

import math
import re

from asyncengine.errors import ModelNotFound
from asyncengine.models.formats.gguf.header import Header, shortest
from asyncengine.models.formats.gguf.model import GgufModel

LAYER = re.compile(r"v\.(blk|deepstack)\.([0-9]{1,5})\.")
"""A tensor's name up to what it is of its layer."""


class Tower:
    """The image part's header, with sizes of its tensors; `model` is the language model."""

    def __init__(self, header: Header, model: GgufModel) -> None:
        """Raises `ModelNotFound` for layers that are not there."""
        self.header, self.model = header, model
        self.width, *_, self.patch = self.shape("v.patch_embd.weight", 4)
        every = [(found[1], int(found[2])) for name in header.tensors if (found := LAYER.match(name))]
        layers, self.deep = (sorted({number for kind, number in every if kind == of}) for of in ("blk", "deepstack"))
        self.layers = len(layers)  # `deep`: those whose hidden states go into the language model's first layers as well
        if layers != list(range(self.layers)):
            raise self.wrong("lacks some of its layers")
        if self.deep and self.deep[-1] >= self.layers:
            raise self.wrong(f"has features of layer {self.deep[-1]}, of {self.layers}")
        outputs, inputs = self.shape("v.blk.0.ffn_up.weight")
        names = ("v.blk.{}.ffn_up", "v.blk.{}.ffn_down")
        self.swapped = dict(zip(names, names[::-1], strict=True)) if inputs != self.width == outputs else {}
        """Names of layers' tensors that early converters took for each other."""
        self.inner = inputs if self.swapped else outputs

    def shape(self, name: str, axes: int = 2) -> tuple[int, ...]:
        """The shape of a tensor that has to be there. Raises `ModelNotFound`."""
        place = self.header.tensors.get(name)
        if place is None or len(place.shape) != axes:
            raise self.wrong(f"lacks the tensor {name}, or has it in another shape than one of {axes} dimensions")
        return place.shape

    def rows(self, name: str) -> int:
        """The number of rows of a tensor's matrices. Raises `ModelNotFound`."""
        place = self.header.tensors.get(name)
        if place is None or len(place.shape) < 2:
            raise self.wrong(f"lacks the tensor {name}, or has it as a vector")
        return int(place.shape[-2])

    def wrong(self, what: str) -> ModelNotFound:
        return ModelNotFound(f"{self.header.path} {what}")

    def sections(self) -> list[int]:
        """Pairs of a head's numbers that rotate by time, row and column. Raises `ModelNotFound`."""
        key = f"{self.model.metadata.short.get('general.architecture')}.rope.dimension_sections"
        found = self.model.metadata.short.get(key)
        found = found[:3] if isinstance(found, list) and 3 <= len(found) <= 4 else []
        rope = self.model.config["rope_parameters"]
        if 2 * sum(found) != int(self.model.config["head_dim"] * rope.get("partial_rotary_factor", 1.0)):
            raise ModelNotFound(f"{self.model.path}: {key} must say which pairs of a head rotate by which axis")
        return found

    def merged(self, name: str) -> int:
        """The side of the square of patches that `name` projects into one token."""
        inputs = self.shape(name)[1]
        side = math.isqrt(inputs // self.width)
        if not side or side * side * self.width != inputs:
            raise self.wrong(f"has {inputs} inputs of {name}, which are no square of patches of {self.width} numbers")
        return side

    def side(self) -> int:
        """Patches along a side of the pictures, which are square, by its table of positions."""
        rows = self.shape("v.position_embd.weight")[0]
        if math.isqrt(rows) ** 2 != rows:
            raise self.wrong(f"has {rows} positions, which are no square")
        return math.isqrt(rows)

    def sizes(self, width: str, inner: str, layers: str, heads: str) -> dict[str, int]:
        """Sizes of the tower's layers under these names."""
        count = self.header.positive("attention.head_count")
        if self.width % count:
            raise self.wrong(f"has {self.width} numbers of hidden states for {count} heads")
        return {width: self.width, inner: self.inner, layers: self.layers, heads: count}

    def colors(self) -> dict[str, list[float]]:
        """Mean and deviation of each color, which are taken from pixels."""
        found = {}
        for name in ("image_mean", "image_std"):
            values = self.header.other(name)
            fit = isinstance(values, list) and len(values) == 3 and all(isinstance(each, float) for each in values)
            if not fit or not all(map(math.isfinite, values)):
                raise self.wrong(f"must have three finite numbers as clip.vision.{name}")
            found[name] = [shortest(value) for value in values]
        return found
