"""Replacing parts of a transformers model by faster forms, each only after it gave the same numbers.

Probing, not tracing: for every part a candidate is built, both run on random input, and the swap is made only if they
agree. A family nobody thought of keeps its own code wherever it differs. Layer by layer, each original weight is
dropped before the next is built, so that the weights are never held twice.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from asyncengine.models.kernels import Kernels
from asyncengine.models.linears import (
    FastLinear,
    GatedMLP,
    Held,
    MergedQKV,
    PanelLinear,
    RMSNorm,
    can_pack,
    panels_serve,
)
from asyncengine.models.mapped import MappedFiles
from asyncengine.models.output_layer import replace_output_layer
from asyncengine.models.probing import random_like, same
from asyncengine.models.progress import LoadProgress
from asyncengine.models.quantized import Quantizer
from asyncengine.models.rotary import fuse_rotary

logger = logging.getLogger("asyncengine")

_QKV = ("q_proj", "k_proj", "v_proj")
_PROBE_ROWS = 5


def fuse(
    module: Any,
    attention_modules: list[Any],
    run: Callable[[], torch.Tensor],
    files: MappedFiles,
    progress: LoadProgress,
    kernels: Kernels | None = None,
    quantizer: Quantizer | None = None,
) -> list[str]:
    """Fuse what can be fused in place; returns what was done, e.g. ["qkv x 28", "rms_norm x 113"].

    `run` executes a short forward of the model as it stands and returns its logits. `kernels` are tried before torch's
    own operations; what was done by them is counted once more, e.g. "rms_norm kernel x 113". With a
    `quantizer`, linears are handed to it instead of being packed.
    """
    fuser = _Fuser(module, files, kernels, pack=quantizer is None)
    ordered = _called_in_order(attention_modules, run)
    parents = [part for part in module.modules() if any(True for _ in part.children())]
    progress.stage("preparing layers", len(parents))
    with torch.inference_mode():
        while parents:  # not kept in the list: what was replaced goes at once, and its weights with it
            parent = parents.pop(0)
            if parent in ordered:
                fuser.merge_qkv(parent)
            for name, child in list(parent.named_children()):
                fuser.replace_norm(parent, name, child)
                fuser.merge_gate_up(parent, name, child)
            if quantizer is not None:
                quantizer.replace_children(parent)
            progress.advance()
        if quantizer is None:
            fuser.replace_output_layer(module)
            fuser.pack_linears(module)
        if fuser.kernels is not None:
            fuser.done["rope kernel"] = fuse_rotary(attention_modules, same, fuser.dtype, fuser.device, fuser.kernels)
        others = fuse_rotary(attention_modules, same, fuser.dtype, fuser.device)
        fuser.done["rope"] = fuser.done["rope kernel"] + others
    return [f"{name} x {count}" for name, count in sorted(fuser.done.items()) if count]


def _called_in_order(attention_modules: list[Any], run: Callable[[], torch.Tensor]) -> set[Any]:
    """Attention modules that call q_proj, k_proj, v_proj once each, in this order, on the same tensor."""
    calls: dict[int, list[tuple[str, int]]] = {}
    hooks = []
    kept: list[torch.Tensor] = []  # alive until compared: an id may not be reused

    def watch(key: int, name: str) -> Callable[[Any, tuple[Any, ...]], None]:
        def hook(_: Any, arguments: tuple[Any, ...]) -> None:
            kept.append(arguments[0])
            calls.setdefault(key, []).append((name, id(arguments[0])))

        return hook

    candidates = [part for part in attention_modules if all(isinstance(_child(part, n), nn.Linear) for n in _QKV)]
    for part in candidates:
        hooks += [_child(part, name).register_forward_pre_hook(watch(id(part), name)) for name in _QKV]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    result = set()
    for part in candidates:
        seen = calls.get(id(part), [])
        if tuple(name for name, _ in seen) == _QKV and len({tensor for _, tensor in seen}) == 1:
            result.add(part)
    return result


def _child(part: Any, name: str) -> Any:
    return getattr(part, name, None)


_NO_CODE = (lambda: None).__code__


class _Fuser:
    """Swaps parts of one model and counts what it did."""

    def __init__(self, module: Any, files: MappedFiles, kernels: Kernels | None, pack: bool) -> None:
        self.done: Counter[str] = Counter()
        self.kernels = kernels
        self._files = files
        parameter = next(iter(module.parameters()))
        self.dtype, self.device = parameter.dtype, parameter.device
        self._like = parameter.new_empty(0)
        self._pack = pack and can_pack(self.dtype, self.device)
        self._panels = pack and self.device.type == "cpu"
        embedding = module.get_input_embeddings()
        self._shared = {embedding.weight.data_ptr()}
        """Weights that are also read as embeddings: packing would make a second copy."""

    def _random(self, features: int) -> torch.Tensor:
        return random_like(self._like, (1, _PROBE_ROWS, features))

    def replace_norm(self, parent: Any, name: str, child: Any) -> None:
        """A leaf with one 1-D weight that turns out to be RMS normalisation, by w or by 1 + w (Gemma)."""
        parameters = list(child.named_parameters())
        if [key for key, _ in parameters] != ["weight"] or child.weight.dim() != 1 or list(child.children()):
            return
        epsilon = next((getattr(child, key) for key in ("variance_epsilon", "eps") if hasattr(child, key)), None)
        if not isinstance(epsilon, float) or isinstance(child, (nn.LayerNorm, RMSNorm)):
            return
        x = self._random(child.weight.shape[0])
        expected = child(x)
        for added in (0, 1):
            weight = added + child.weight.data
            candidate = RMSNorm(weight, epsilon)
            if not same(expected, candidate(x)):
                continue
            if self.kernels is not None:
                whole = added + child.weight.data.to(self.kernels.norm_dtype or self.dtype)
                faster = RMSNorm(whole, epsilon, self.kernels.rms_norm, self.kernels.add_rms_norm)
                if self._error(faster, x, expected) is not None and self._adds(faster, x):
                    candidate = faster
                    self.done["rms_norm kernel"] += 1
            setattr(parent, name, candidate)
            self.done["rms_norm"] += 1
            return

    def _adds(self, norm: RMSNorm, x: torch.Tensor) -> bool:
        """Does its sum and norm in one give what they give one by one?"""
        total, normed = norm.add(x, x.flip(1), 0.5)
        return same(x + x.flip(1) * 0.5, total) and same(norm(total), normed)

    def merge_qkv(self, attention: Any) -> None:
        parts = [_child(attention, name) for name in _QKV]
        x = self._random(parts[0].in_features)
        expected = [part(x) for part in parts]
        merged = self._merge(parts)
        if merged is None:
            return
        sizes = tuple(part.out_features for part in parts)
        if not all(same(left, right) for left, right in zip(expected, merged(x).split(sizes, dim=-1), strict=True)):
            return
        owner = MergedQKV(merged, sizes)
        attention.q_proj, attention.k_proj, attention.v_proj = owner, Held(owner.take), Held(owner.take)
        self._drop(parts)
        self.done["qkv"] += 1

    def merge_gate_up(self, parent: Any, name: str, child: Any) -> None:
        gate, up, down = (_child(child, key) for key in ("gate_proj", "up_proj", "down_proj"))
        activation = _child(child, "act_fn") or _child(child, "activation_fn")
        if not all(isinstance(part, nn.Linear) for part in (gate, up, down)) or activation is None:
            return
        if gate.weight.shape != up.weight.shape:
            return
        x = self._random(gate.in_features)
        expected = child(x)
        merged = self._merge([gate, up])
        if merged is None:
            return
        candidate = GatedMLP(merged, down, activation)
        if isinstance(expected, torch.Tensor) and same(expected, candidate(x)):
            setattr(parent, name, self._with_kernel(candidate, merged, down, activation, x))
            self._drop([gate, up])
            self.done["gate_up"] += 1

    def _with_kernel(
        self, plain: GatedMLP, merged: FastLinear, down: Any, activation: Any, x: torch.Tensor
    ) -> GatedMLP:
        """`plain` with the gated activation that comes nearest, if one comes near enough."""
        if self.kernels is None:
            return plain
        expected = plain(x)
        forms = [GatedMLP(merged, down, activation, gated) for gated in self.kernels.gated()]
        errors = [(error, form) for form in forms if (error := self._error(form, x, expected)) is not None]
        if not errors:
            return plain
        self.done["gate_up kernel"] += 1
        return min(errors, key=lambda entry: entry[0])[1]

    def _error(self, candidate: Any, x: torch.Tensor, expected: torch.Tensor) -> float | None:
        """Largest difference of a form that runs on a kernel; None: it cannot be built here, or it differs."""
        try:
            found = candidate(x)
        except Exception as error:  # no compiler, a size it does not know: torch's own forms stay
            logger.warning("fused kernels are torch's own: %s: %s", type(error).__name__, error)
            self.kernels = None  # the next one would fail alike, perhaps after minutes of compiling
            return None
        return float((expected.float() - found.float()).abs().max()) if same(expected, found) else None

    def replace_output_layer(self, module: Any) -> None:
        if replace_output_layer(module, self.dtype, self._files.release):
            self.done["output_layer"] += 1

    def pack_linears(self, module: Any) -> None:
        """Every linear left, but for those that share their weight with the embedding or whose parent reads weights."""
        for parent in list(module.modules()):
            if "weight" in getattr(type(parent).forward, "__code__", _NO_CODE).co_names:
                continue  # HunYuan's router asks for its type
            for name, child in list(parent.named_children()):
                if type(child) is not nn.Linear or child.weight.data_ptr() in self._shared:
                    continue
                packed = self._packed([child.weight.data], None if child.bias is None else child.bias.data)
                if packed is not None:
                    setattr(parent, name, packed)
                    self._drop([child])

    def _merge(self, parts: list[Any]) -> FastLinear | None:
        """One linear with the outputs of `parts` side by side; None where they cannot be joined."""
        biases = [part.bias for part in parts]
        if any(type(part) is not nn.Linear or part.weight.data_ptr() in self._shared for part in parts):
            return None
        if any((bias is None) != (biases[0] is None) for bias in biases):
            return None
        bias = None if biases[0] is None else torch.cat([part.bias.data for part in parts])
        weights = [part.weight.data for part in parts]
        return self._packed(weights, bias) or FastLinear(torch.cat(weights), bias, pack=False)

    def _packed(self, weights: list[torch.Tensor], bias: torch.Tensor | None) -> FastLinear | None:
        """One linear with these weights side by side, in its fastest form; None: there is none but torch's own."""
        if not (self._panels or self._pack):
            return None
        x = self._random(weights[0].shape[1])
        expected = torch.cat([nn.functional.linear(x, weight) for weight in weights], dim=-1)
        expected = expected if bias is None else expected + bias
        if self._panels and panels_serve(*weights):
            try:
                panels = PanelLinear(weights, bias, read=self._files.release)
                found = panels(x)
            except Exception as error:  # a compiler that does not know this CPU: oneDNN's form does
                logger.warning("products are oneDNN's: %s: %s", type(error).__name__, error)
                self._panels = False
            else:
                if same(expected, found):
                    self.done["panel_linear"] += 1
                    return panels
        if not self._pack:
            return None
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        packed = FastLinear(weight, None if bias is None else bias.clone(), pack=True)
        if not same(expected, packed(x)):
            return None
        self.done["packed_linear"] += 1
        return packed

    def _drop(self, parts: list[Any]) -> None:
        """The weights of `parts` are not needed any more."""
        for part in parts:
            for parameter in part.parameters():
                self._files.release(parameter.data)
