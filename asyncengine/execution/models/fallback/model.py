"""Causal language models of all other families, run through transformers' own modules, unfused.

A family without a table in `families` runs as its authors wrote it, except for its attention, which goes through
transformers' attention interface into the engine's paged attention. Each loaded model is *probed*: a short forward
records the attention of every layer (heads, scale, window, soft-capping, sinks) and must agree with the same forward
under transformers' own eager attention. A family that ignores the interface, encodes something in masks or keeps other
state than keys and values is refused here, instead of giving wrong answers later. Code from a model's folder
(`trust_remote_code`) runs only here.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn

from asyncengine.errors import UnsupportedModel, shorten
from asyncengine.execution.attention.base import StepAttention
from asyncengine.execution.device.arena import OutputBufferPool
from asyncengine.execution.layers.options import HEAD_BITS, bits_of, rounded_weight
from asyncengine.execution.layers.step import CausalLM, LoraTarget, StepContext
from asyncengine.execution.models.fallback.probing import LayerAttention, Recorder, attach


class CurrentStep:
    """The step that a transformers module is computing, which its own code has no argument to pass on."""

    def __init__(self) -> None:
        self.context: StepContext | None = None


class Adapted(nn.Module):
    """A linear or embedding, plus what the low-rank adapters of a step's rows add. Other attributes are the inner's."""

    def __init__(self, inner: nn.Module, path: str, head: bool, current: CurrentStep) -> None:
        super().__init__()
        self.inner = inner
        self._path, self._head, self._current = path, head, current

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)  # some ask a linear for its weight's type

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] or token ids -> [..., outputs]."""
        y: torch.Tensor = self.inner(x)
        context = self._current.context
        adapters = None if context is None else context.row_adapters if self._head else context.adapters
        if adapters is not None:
            adapters.add(self._path, x, y)
        return y


def adapt(model: Any, current: CurrentStep) -> list[LoraTarget]:
    """Wrap every linear and the embedding of `model` so that adapters act on them; returns them in the model's order.
    To be called once for a model.

    Linears of single experts are left out: they see some of the tokens, in an order of their own.
    """
    from transformers.pytorch_utils import Conv1D

    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    targets: list[LoraTarget] = []
    role: Literal["", "own", "tied"]
    for path, child in list(model.named_modules()):
        if "experts" in path.split("."):
            continue
        if child is table:
            rows, width = child.weight.shape
            scale = float(getattr(child, "embed_scale", 1.0))
            targets.append(LoraTarget(rows, ((path, width),), "embedding", scale=scale))
        elif isinstance(child, (nn.Linear, QuantizedLinear)):
            linear, quantized = cast(Any, child), isinstance(child, QuantizedLinear)
            read = linear.form.read_rows if quantized else partial(_read_rows, linear.weight.data)
            role = "" if linear is not head else "own" if quantized or linear.weight is not table.weight else "tied"
            modules = ((path, linear.out_features),)
            targets.append(LoraTarget(linear.in_features, modules, head=role, read_rows=read, bias=linear.bias))
        elif isinstance(child, Conv1D):  # stores the transpose, but maps in to out like any other
            read, modules = partial(_read_rows, child.weight.data.T), ((path, child.nf),)
            targets.append(LoraTarget(child.nx, modules, "conv1d", read_rows=read, bias=child.bias))
        else:
            continue
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, Adapted(child, path, child is head, current))
    return targets


def _read_rows(weight: torch.Tensor, ids: torch.Tensor, out: torch.Tensor) -> None:
    torch.index_select(weight, 0, ids, out=out)


class TransformersModel(CausalLM):
    """A family's module in transformers, with the engine's attention."""

    compiled = False
    unsteady: str | None = "it runs through transformers, whose sums depend on what is computed together"

    def __init__(self, module: Any, recorder: Recorder, logits: torch.Tensor) -> None:
        """`recorder` and `logits`: the results of `probe`."""
        parameter = next(iter(module.parameters()))
        self.module = module
        self.specs = recorder.specs
        self.dtype, self.device = parameter.dtype, parameter.device
        self.vocab_size = logits.shape[-1]
        self.input_vocab_size = int(module.get_input_embeddings().weight.shape[0])
        self._attention_modules = recorder.modules
        self.bound: StepAttention | None = None
        """The attention backend that the attention modules call; None before the first forward and after `unbind`."""
        self._current = CurrentStep()
        self._targets: list[LoraTarget] | None = None

    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] of `rows` (int64 [N], ascending) of ids [T]."""
        if step.backend is not self.bound:
            for index, module in enumerate(self._attention_modules):
                attach(module, LayerAttention(index, step.backend))
            self.bound = step.backend
        self._current.context = step
        try:
            output = self.module(
                input_ids=ids[None], position_ids=step.positions[None], use_cache=False, logits_to_keep=rows
            )
        finally:
            self._current.context = None
        return output.logits[0]

    def lora_targets(self) -> list[LoraTarget]:
        """Modules that adapters may change, in the model's order."""
        if self._targets is None:
            self._targets = adapt(self.module, self._current)
        return list(self._targets)

    def unbind(self) -> None:
        """Drop the reference to the attention backend of earlier forwards. Idempotent."""
        for module in self._attention_modules:
            attach(module, None)
        self.bound = None


def freeze_rotary(module: Any, max_model_len: int, device: torch.device) -> None:
    """Fix rotary frequencies that transformers would recompute in each step for the longest position in it.

    "dynamic" and "longrope" scaling depend on the sequence length; in a flat batch that would be that of the longest
    sequence, and keys cached under one set of frequencies would meet queries under another. They are set once, for
    `max_model_len`, as vLLM does. Other types are left alone.
    """
    for rotary in module.modules():
        rope_type = getattr(rotary, "rope_type", None)
        if rope_type is None or not hasattr(rotary, "original_max_seq_len"):
            continue
        last = torch.tensor([[max_model_len - 1]], device=device)
        sample = torch.zeros(1, dtype=torch.float32, device=device)
        if isinstance(rope_type, dict):
            for layer_type, name in rope_type.items():
                if _depends_on_length(name):
                    rotary(sample, last, layer_type)
            rotary.rope_type = {key: "default" if _depends_on_length(name) else name for key, name in rope_type.items()}
        elif _depends_on_length(rope_type):
            rotary(sample, last)
            rotary.rope_type = "default"


def _depends_on_length(rope_type: str) -> bool:
    return "dynamic" in rope_type or rope_type == "longrope"


_SEED = 0
_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
"""Fields of config.json with the name of an activation, in different families."""


def make_random(hf_config: Any, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> Any:
    """A model of `hf_config` with weights as its family initialises them, the same at every call on one device: for
    measuring speed, which does not depend on them (`load_format="dummy"`, as in vLLM).

    The process's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(_SEED)
        return _build(hf_config, dtype, trust_remote_code)


def count_elements(hf_config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> int:
    """Number of weights of such a model, counted without allocating them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in _build(hf_config, dtype, trust_remote_code).parameters())


def _build(hf_config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.activations import ACT2FN
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    try:
        return AutoModelForCausalLM.from_config(
            hf_config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    except KeyError as error:  # modules look these names up in tables, when they are built
        value, content = repr(error.args[0]), repr(hf_config.to_dict())
        tables = dict.fromkeys(_ACTIVATIONS, ACT2FN) | {"rope_type": ("default", *ROPE_INIT_FUNCTIONS)}
        for field, known in tables.items():
            if f"{field!r}: {value}" in content:
                text = f"config.json: {field} is {shorten(value, 80)}; known are {', '.join(known)}"
                raise UnsupportedModel(text) from None
        raise


# Quantization of a transformers model's linears to 8 or 4 bits, and of its output layer to 8.


class QuantizedLinear(nn.Module):
    """Linear layer with a quantized weight. As an output layer (`head`) it gives float32 logits."""

    def __init__(self, linear: nn.Linear, bits: int, head: bool = False, exact: bool = False) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        weight = linear.weight.data
        shape = (self.out_features, self.in_features)
        self.form = rounded_weight(*shape, bits, weight.dtype, weight.device, exact=exact)
        self.form.load(0, weight)
        self.bias = None if linear.bias is None else linear.bias.data.float().clone()
        self._memory = OutputBufferPool() if head else None

    @property
    def nbytes(self) -> int:
        return self.form.nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._memory is not None:
            return self.form.logits(x, self.bias, self._memory)
        return self.form.multiply(x, self.bias)


def quantize_module(module: Any, bits: int, exact: bool = False) -> list[str]:
    """Quantize every linear in place. Returns their numbers by form, e.g. ["int4 x 112", "int8 x 1"].

    An output layer that is tied to the embedding is left alone, as the family's own code reads its rows. Raises
    `UnsupportedModel` if there is nothing to quantize.
    """
    head, table = module.get_output_embeddings(), module.get_input_embeddings()
    counts: dict[str, int] = {}
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            code: Any = getattr(type(parent).forward, "__code__", None)
            is_read = code is not None and "weight" in code.co_names  # HunYuan's router asks for its type
            if type(child) is not nn.Linear or child.weight is table.weight or is_read:
                continue
            layer_bits = HEAD_BITS if child is head else bits_of(f".{name}", bits) or bits
            quantized = QuantizedLinear(child, layer_bits, child is head, exact)
            setattr(parent, name, quantized)
            counts[quantized.form.name] = counts.get(quantized.form.name, 0) + 1
    if not counts:
        family = module.config.model_type
        raise UnsupportedModel(f"family {family!r} has no linear layers to quantize: leave quantization out")
    return [f"{name} x {count}" for name, count in sorted(counts.items())]


def resident_bytes(module: Any) -> int:
    """Bytes of all weights, quantized or not, counting tied ones once."""
    sizes: dict[int, int] = {layer.data_ptr(): layer.numel() * layer.itemsize for layer in module.parameters()}
    return sum(sizes.values()) + sum(layer.nbytes for layer in module.modules() if isinstance(layer, QuantizedLinear))
