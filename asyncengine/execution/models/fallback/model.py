"""Any other causal language model, run through transformers' own modules, unfused.

A family without a file in `families` runs as its authors wrote it, but for its attention, which goes through
transformers' attention interface into the engine's paged attention. What is loaded is *tried*: a short forward records
each layer's attention (heads, scale, window, soft-capping, sinks) and must agree with the same forward under
transformers' own eager attention. A family that ignores the interface, hides something in masks or keeps other state
than keys and values is refused here instead of answering wrongly later. Code from a model's folder
(`trust_remote_code`) runs only here.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, cast

import torch
from torch import nn

from asyncengine.errors import UnsupportedModel
from asyncengine.execution.attention.base import StepAttention
from asyncengine.execution.device.arena import OutputBufferPool
from asyncengine.execution.layers.options import HEAD_BITS, bits_of, rounded_weight
from asyncengine.execution.layers.step import CausalLM, LoraTarget, StepContext
from asyncengine.execution.models.fallback.probing import LayerAttention, Recorder, attach


class CurrentStep:
    """The step that a transformers module computes now: its own code passes on no argument of ours."""

    def __init__(self) -> None:
        self.context: StepContext | None = None


class Adapted(nn.Module):
    """A part of the model, followed by what the low-rank adapters of a step's rows add. Else it is that part."""

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
    """Let adapters act on every linear and on the embedding of `model`, in its order; once for a model.

    Linears of single experts are left out: they see a part of the tokens, in an order of their own.
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
        """The attention backend that its modules call; None: none yet, or it was let go."""
        self._current = CurrentStep()
        self._targets: list[LoraTarget] | None = None

    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab] of `rows` (int64 [N], ascending) of ids [T]."""
        if step.backend is not self.bound:
            for index, part in enumerate(self._attention_modules):
                attach(part, LayerAttention(index, step.backend))
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
        """Products that adapters may change, in the model's order."""
        if self._targets is None:
            self._targets = adapt(self.module, self._current)
        return list(self._targets)

    def unbind(self) -> None:
        """Let go of the attention backend of earlier forwards. Idempotent."""
        for part in self._attention_modules:
            attach(part, None)
        self.bound = None


def freeze_rotary(module: Any, max_model_len: int, device: torch.device) -> None:
    """Fix frequencies that transformers would choose anew per step by the longest position in it.

    "dynamic" and "longrope" scaling depend on sequence length; in a flat batch that would be the longest neighbour's,
    and keys cached under one choice would meet queries under another. They are set once, for `max_model_len`, as vLLM
    does. Other types are left alone.
    """
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if kinds is None or not hasattr(part, "original_max_seq_len"):
            continue
        last = torch.tensor([[max_model_len - 1]], device=device)
        sample = torch.zeros(1, dtype=torch.float32, device=device)
        if isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if _changes(kind):
                    part(sample, last, layer_type)
            part.rope_type = {key: "default" if _changes(kind) else kind for key, kind in kinds.items()}
        elif _changes(kinds):
            part(sample, last)
            part.rope_type = "default"


def _changes(kind: str) -> bool:
    return "dynamic" in kind or kind == "longrope"


_SEED = 0


def make_random(hf_config: Any, dtype: torch.dtype, device: torch.device, trust_remote_code: bool = False) -> Any:
    """A model of `hf_config` with weights as its family initialises them, the same at every call on one device: for
    measuring speed, which does not depend on them (`load_format="dummy"`, vLLM's setting).

    The process's random state is left as it was.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(_SEED)
        return _build(hf_config, dtype, trust_remote_code)


def count_elements(hf_config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> int:
    """Elements of the weights of such a model, without making them."""
    with torch.device("meta"):
        return sum(part.numel() for part in _build(hf_config, dtype, trust_remote_code).parameters())


def _build(hf_config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        hf_config, dtype=dtype, attn_implementation="eager", trust_remote_code=trust_remote_code
    )


# Linears of a transformers model in 8 or 4 bits, and its output layer in 8.


class QuantizedLinear(nn.Module):
    """x -> x W^T + b with W rounded; logits (`head`) are float32."""

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
    """Replace every linear; says what was done, e.g. ["int4 x 112", "int8 x 1"].

    An output layer that is the embedding as well stays: it is looked up by the family's own code. Raises
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
            own = HEAD_BITS if child is head else bits_of(f".{name}", bits) or bits
            made = QuantizedLinear(child, own, child is head, exact)
            setattr(parent, name, made)
            counts[made.form.name] = counts.get(made.form.name, 0) + 1
    if not counts:
        family = module.config.model_type
        raise UnsupportedModel(f"family {family!r} has no linear layers to quantize: leave quantization out")
    return [f"{name} x {count}" for name, count in sorted(counts.items())]


def resident_bytes(module: Any) -> int:
    """Bytes of all weights, quantized or not, each counted once."""
    held: dict[int, int] = {part.data_ptr(): part.numel() * part.itemsize for part in module.parameters()}
    return sum(held.values()) + sum(part.nbytes for part in module.modules() if isinstance(part, QuantizedLinear))
