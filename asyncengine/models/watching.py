"""What a transformers model does between its modules, seen from outside while it computes a few tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from asyncengine.models.attention_function import Recorder, attach
from asyncengine.models.probing import Context, same

_TOKENS = 7


class Parts(NamedTuple):
    """The modules of a decoder-only model."""

    embedding: Any
    rotary: Any
    layers: list[Any]
    norm: Any
    head: Any


class Table(NamedTuple):
    """One of a forward's calls of the rotary embedding: what that gets beside the positions."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


class Call(NamedTuple):
    """How a layer is called beside its input and the positions."""

    constants: dict[str, Any]
    table: int | None
    """Which of the forward's tables it gets as `position_embeddings`; None: none."""


class Seen(NamedTuple):
    """One forward, in the only form that `find` accepts."""

    ids: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    scale: float | None
    """Embeddings are multiplied by this before the first layer; None: they are not."""
    tables: list[Table]
    embeddings: list[Any]
    """What these calls gave."""
    calls: list[Call]
    contexts: list[Context]
    """What each layer got, with the tensors of this forward."""
    embedded: torch.Tensor
    raw_logits: torch.Tensor
    """What the output layer gave."""
    logits: torch.Tensor


def find_parts(module: Any, count: int) -> Parts | None:
    """The parts of a model of `count` layers by the names that most families use; None: this one uses others."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    if embedding is None or head is None:
        return None
    for owner in module.modules():  # of a model that also sees pictures, one part
        rotary, layers, norm = (getattr(owner, name, None) for name in ("rotary_emb", "layers", "norm"))
        if isinstance(layers, nn.ModuleList) and len(layers) == count and rotary is not None and norm is not None:
            return Parts(embedding, rotary, list(layers), norm, head)
    return None


def first_positions(parts: Parts, last: int) -> list[int]:
    """Where to watch: at the beginning, and as far from it as tables that change with the length stay what they are."""
    limits = [last, getattr(parts.rotary, "original_max_seq_len", last)]
    far = min(limit for limit in limits if isinstance(limit, int)) - _TOKENS
    return [0, far] if far > _TOKENS else [0]


@contextmanager
def answering(modules: Sequence[Any]) -> Iterator[None]:
    """Attention modules attend as they should, outside of any runner."""
    recorder = Recorder()
    for module in modules:
        attach(module, recorder)
    try:
        yield
    finally:
        for module in modules:
            attach(module, None)


@contextmanager
def louder(head: Any, factor: float) -> Iterator[None]:
    """The output layer gives `factor` times as much."""
    hook = head.register_forward_hook(lambda _, arguments, output: output * factor)
    try:
        yield
    finally:
        hook.remove()


class _Watch:
    """Hooks on the parts of a model that keep what passes."""

    def __init__(self, parts: Parts) -> None:
        self.tables: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = []
        self.layers: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.embedded: list[torch.Tensor] = []
        self.normed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.headed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._hooks = [
            parts.embedding.register_forward_hook(lambda _, given, out: self.embedded.append(out)),
            parts.rotary.register_forward_hook(self._table, with_kwargs=True),
            parts.norm.register_forward_hook(lambda _, given, out: self.normed.append((given[0], out))),
            parts.head.register_forward_hook(lambda _, given, out: self.headed.append((given[0], out))),
            *(layer.register_forward_hook(self._layer, with_kwargs=True) for layer in parts.layers),
        ]

    def _table(self, _: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        self.tables.append((arguments, keywords, output))

    def _layer(self, layer: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
        self.layers.append((layer, arguments, keywords, output))

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()


def watch(module: Any, parts: Parts, attention_modules: Sequence[Any], first: int, factor: float) -> Seen:
    """A forward of a few tokens from position `first` on, with logits `factor` times as large.

    Raises `ValueError` if more happens between the parts than a `Seen` can say.
    """
    device = parts.norm.weight.device
    ids = torch.arange(1, _TOKENS + 1, device=device).remainder_(parts.embedding.weight.shape[0])[None]
    positions = torch.arange(first, first + _TOKENS, device=device)[None]
    rows = torch.tensor([1, 2, _TOKENS - 1], device=device)
    with answering(attention_modules), louder(parts.head, factor):
        seen = _Watch(parts)
        try:
            output = module(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=rows)
        finally:
            seen.stop()
    _check_chain(seen, parts, rows)
    calls = [_call(keywords, positions, seen.tables) for _, _, keywords, _ in seen.layers]
    return Seen(
        ids=ids,
        positions=positions,
        rows=rows,
        scale=_scale(module.config, seen.embedded[0], seen.layers[0][1][0]),
        tables=[_table(arguments, keywords, positions) for arguments, keywords, _ in seen.tables],
        embeddings=[output for *_, output in seen.tables],
        calls=calls,
        contexts=[keywords for _, _, keywords, _ in seen.layers],
        embedded=seen.embedded[0],
        raw_logits=seen.headed[0][1],
        logits=output.logits,
    )


def _check_chain(seen: _Watch, parts: Parts, rows: torch.Tensor) -> None:
    """Each part once, on what the one before gave."""
    if [layer for layer, *_ in seen.layers] != parts.layers or len(seen.embedded) != 1:
        raise ValueError("layers are not called once each, in order")
    outputs = [seen.embedded[0], *(output for *_, output in seen.layers)]
    inputs = [arguments[0] for _, arguments, _, _ in seen.layers]
    if any(len(arguments) != 1 for _, arguments, _, _ in seen.layers) or len(seen.normed) != 1 or len(seen.headed) != 1:
        raise ValueError("parts are called in another way")
    inputs.append(seen.normed[0][0])
    if not all(isinstance(output, torch.Tensor) for output in outputs):
        raise ValueError("a layer gives more than one tensor")
    if not all(torch.equal(output, given) for output, given in zip(outputs[1:], inputs[1:], strict=True)):
        raise ValueError("something happens between layers")
    if not torch.equal(seen.normed[0][1].index_select(1, rows), seen.headed[0][0]):
        raise ValueError("something happens between the norm and the output layer")


def _scale(config: Any, embedded: torch.Tensor, first: torch.Tensor) -> float | None:
    if torch.equal(embedded, first):
        return None
    factor = float(config.get_text_config().embedding_multiplier)
    if not same(first, embedded * factor):
        raise ValueError("something happens before the first layer")
    return factor


def _table(arguments: tuple[Any, ...], keywords: dict[str, Any], positions: torch.Tensor) -> Table:
    """A call of the rotary embedding as (states, positions, rest)."""
    given = [*arguments[1:2], *(keywords[name] for name in ("position_ids",) if name in keywords)]
    rest = Table(arguments[2:], {name: value for name, value in keywords.items() if name != "position_ids"})
    if len(given) != 1 or not torch.equal(given[0], positions) or not _constant([*rest[0], *rest[1].values()]):
        raise ValueError("rotary embedding is called in another way")
    return rest


def _call(keywords: dict[str, Any], positions: torch.Tensor, tables: Sequence[tuple[Any, Any, Any]]) -> Call:
    rest = dict(keywords)
    given, embeddings = rest.pop("position_ids", None), rest.pop("position_embeddings", None)
    if not isinstance(given, torch.Tensor) or not torch.equal(given, positions) or not _constant(list(rest.values())):
        raise ValueError("layers are given more than positions")
    if embeddings is None:
        return Call(rest, None)
    places = [place for place, (_, _, output) in enumerate(tables) if output is embeddings]
    if len(places) != 1:
        raise ValueError("layers are given other cosines and sines than the rotary embedding's")
    return Call(rest, places[0])


def _constant(values: Sequence[Any]) -> bool:
    return all(value is None or isinstance(value, (bool, int, float, str)) for value in values)
