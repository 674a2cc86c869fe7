"""Checks whether a family's class in transformers can run here, and whether the engine's attention in it gives the same
results as its own on a few tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from asyncengine.errors import ModelNotFound, UnsupportedModel
from asyncengine.execution.attention.base import LayerSpec, StepAttention
from asyncengine.execution.attention.torch_paged import causal_bias, masked_attention
from asyncengine.execution.models.families import MULTIMODAL
from asyncengine.execution.models.formats import CheckpointSource, first_line
from asyncengine.execution.models.refusals import misnamed, not_causal

ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_STATE_WEIGHTS = ("A_log", "dt_bias", ".A", ".D")
"""Endings of the names of weights that recurrent layers have and attention layers do not."""


def load_config(checkpoint: CheckpointSource, trust_remote_code: bool) -> Any:
    """transformers' config object. Raises `UnsupportedModel` for an unknown family or one that needs its own code."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    family = checkpoint.config.get("model_type")
    if not isinstance(family, str) or not family:
        raise ModelNotFound(f"{checkpoint.folder / 'config.json'} names no model_type")
    if family not in CONFIG_MAPPING_NAMES and not trust_remote_code:
        if checkpoint.config.get("auto_map"):
            raise UnsupportedModel(
                f"family {family!r} needs code from the model's folder; trust_remote_code=True would run it"
            )
        raise UnsupportedModel(f"family {family!r} is not known to the installed transformers")
    try:
        # GGUF models have no such file, and that of a decision model is not its text model's
        if checkpoint.metadata or "decision_head" in checkpoint.config:
            return AutoConfig.for_model(**checkpoint.config)
        return AutoConfig.from_pretrained(
            str(checkpoint.folder), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:  # config classes validate in many ways, each with its own exception
        if error_of_layers := misnamed(checkpoint.config):
            raise error_of_layers from error
        raise ModelNotFound(
            f"{checkpoint.folder / 'config.json'} is not a valid {family} config: {first_line(error)}"
        ) from error


def check_family(hf_config: Any, checkpoint: CheckpointSource) -> None:
    """Refuse a family without a causal language model in transformers, one whose attention cannot be replaced, and
    quantized weights. Raises `UnsupportedModel`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    family = hf_config.model_type
    if getattr(hf_config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"family {family!r} is an encoder-decoder; only decoder-only models run here")
    auto_map = checkpoint.config.get("auto_map")
    has_own = isinstance(auto_map, dict) and "AutoModelForCausalLM" in auto_map
    if family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not has_own:
        if family in MULTIMODAL:
            text = hf_config.get_text_config().model_type
            raise UnsupportedModel(
                f"family {family!r} with a language model {text!r} is not written down here, nor all options of others"
            )
        raise not_causal(family, checkpoint.config)
    if type(hf_config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_class(family, MODEL_FOR_CAUSAL_LM_MAPPING[type(hf_config)], hf_config.get_text_config())
    if formats := sorted(set(checkpoint.quantized_types().values())):
        raise UnsupportedModel(
            f"family {family!r} runs through transformers' modules here, which take no quantized weights "
            f'({", ".join(formats)}); use the unquantized weights, with quantization="int8" or "int4" if they are '
            "too large"
        )


def named_layer_types(text_config: Any) -> Sequence[str]:
    """The type of each layer, from `layer_types` or Nemotron-H's `layers_block_type`; empty if neither is there."""
    named = getattr(text_config, "layer_types", None) or getattr(text_config, "layers_block_type", None)
    return named if isinstance(named, (list, tuple)) else ()


def check_class(family: str, model_class: Any, text_config: Any) -> None:
    """Refuse a model class with recurrent layers, or whose attention cannot be replaced. Raises `UnsupportedModel`."""
    layer_types = named_layer_types(text_config)  # models of a stateful class may have attention only (Granite 4)
    if getattr(model_class, "_is_stateful", False) and not (layer_types and ATTENTION_LAYERS.issuperset(layer_types)):
        raise _keeps_state(family)
    if not (getattr(model_class, "_supports_attention_backend", False) or model_class._can_set_attn_implementation()):
        raise UnsupportedModel(f"family {family!r} does not route its attention through transformers' interface")


def check_module(family: str, module: Any) -> None:
    """`check_class` for a loaded model, whose modules show whether they keep state. Raises `UnsupportedModel`."""
    check_class(family, type(module), module.config.get_text_config())
    if getattr(module, "_is_stateful", False):
        if any(isinstance(child, torch.nn.Conv1d) for child in module.modules()):
            raise _keeps_state(family)
        if any(name.endswith(_STATE_WEIGHTS) for name, _ in module.named_parameters()):
            raise _keeps_state(family)


def _keeps_state(family: str) -> UnsupportedModel:
    return UnsupportedModel(f"family {family!r} keeps recurrent state (Mamba or linear attention)")


# The attention function registered with transformers, and the handler that it calls for each attention module.
#
# transformers looks up attention functions by name in a process-wide table. Ours holds no state: it calls the handler
# attached to its attention module, so that any number of engines can run side by side. Its name is left out of the mask
# table, so that transformers builds no mask at all. Keyword arguments are read once, while a short forward is recorded
# at load time, because some families do not pass them in every forward.

NAME = "asyncengine"
_ATTRIBUTE = "asyncengine_attention"


AttentionHandler = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]], torch.Tensor]
"""Attached to an attention module: (module, query [1, heads, T, dim], key and value [1, kv heads, T, dim], further
arguments) -> [1, T, heads, value dim], contiguous."""


def attention_function(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **arguments: Any
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. The module must carry a handler (`attach`)."""
    handler: AttentionHandler = getattr(module, _ATTRIBUTE)
    return handler(module, query, key, value, arguments), None


def attach(module: Any, handler: AttentionHandler | None) -> None:
    """Set the handler of an attention module, or remove it with None."""
    if handler is None:
        module.__dict__.pop(_ATTRIBUTE, None)
    else:
        module.__dict__[_ATTRIBUTE] = handler


class LayerAttention:
    """Handler of one layer during execution: hands the flat tokens to the backend."""

    __slots__ = ("backend", "layer")

    def __init__(self, layer: int, backend: StepAttention) -> None:
        self.layer = layer
        self.backend = backend

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
    ) -> torch.Tensor:
        self.backend.write(self.layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        return self.backend.attend(self.layer, query[0].transpose(0, 1))[None]


class Recorder:
    """Handler that records each layer's `LayerSpec` during a forward, in call order, and computes its attention."""

    def __init__(self) -> None:
        self.modules: list[Any] = []
        self.specs: list[LayerSpec] = []

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
    ) -> torch.Tensor:
        sinks = arguments.get("s_aux")
        scale = arguments.get("scaling")
        window = arguments.get("sliding_window")
        spec = LayerSpec(
            index=len(self.specs), num_heads=query.shape[1], num_kv_heads=key.shape[1], key_dim=query.shape[-1],
            value_dim=value.shape[-1], scale=query.shape[-1] ** -0.5 if scale is None else float(scale),
            window=None if window is None else int(window), softcap=arguments.get("softcap") or None,
            sinks=None if sinks is None else sinks.detach(),
        )  # fmt: skip
        self.modules.append(module)
        self.specs.append(spec)
        return _plain_attention(spec, query, key, value)


def _plain_attention(spec: LayerSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one unpaged sequence, [1, T, heads, value dim]."""
    length = query.shape[2]
    bias = causal_bias(0, length, 0, length, spec.window, query)
    grouped = query[0].view(spec.num_kv_heads, -1, length, spec.key_dim)
    sinks = None if spec.sinks is None else spec.sinks.view(spec.num_kv_heads, -1, 1, 1)
    out = masked_attention(spec, grouped, key[0][:, None], value[0][:, None], bias, sinks)
    return out.flatten(0, 1).transpose(0, 1)[None].contiguous()


_PROBE_TOKENS = 7
_PROBE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest difference of a model's logits, relative to the largest logit."""
_LAYER_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.01}
"""Largest difference of one layer's attention, relative to its largest number."""


def _within(expected: torch.Tensor, actual: torch.Tensor, errors: Mapping[torch.dtype, float]) -> bool:
    difference = float((expected.float() - actual.float()).abs().max())
    return difference <= errors[expected.dtype] * float(expected.float().abs().max())


def probe(module: Any, device: torch.device) -> tuple[Recorder, torch.Tensor]:
    """Run a few tokens under eager attention and under the engine's, which stays set. Returns the recorded layers, and
    logits [tokens, vocab].

    Raises `UnsupportedModel` if the engine's attention is not called once per layer, or the logits differ.
    """
    from transformers import AttentionInterface

    family = module.config.model_type
    try:
        tokens, positions = _probe_input(module, device)
        with torch.inference_mode():
            expected = module(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
        AttentionInterface.register(NAME, attention_function)
        module.set_attn_implementation(NAME)
        keep = torch.arange(_PROBE_TOKENS, device=device)
        with _recording(module.modules()) as recorder:
            output = module(input_ids=tokens, position_ids=positions, use_cache=False, logits_to_keep=keep)
            logits: torch.Tensor = output.logits[0]
    # without masks and caches, code of other families fails in any of these ways
    except (TypeError, ValueError, RuntimeError, IndexError, KeyError, AttributeError) as error:
        raise UnsupportedModel(
            f"family {family!r} does not run on flat, unpadded batches: {first_line(error)}"
        ) from error
    if module.config.get_text_config()._attn_implementation != NAME:
        raise UnsupportedModel(f"family {family!r} does not let its attention be set")
    _check_layers(module, recorder)
    # equal up to the rounding that a whole model accumulates in its type
    if not _within(expected, logits, _PROBE_ERROR) and not _layers_agree(module, recorder.modules, device):
        raise UnsupportedModel(f"family {family!r} computes more in its attention than the interface passes on")
    return recorder, logits


@contextmanager
def _recording(modules: Iterable[Any]) -> Iterator[Recorder]:
    """Context in which the attention of these modules goes through a recorder."""
    recorder, attached = Recorder(), list(modules)
    for module in attached:
        attach(module, recorder)
    try:
        with torch.inference_mode():
            yield recorder
    finally:
        for module in attached:
            attach(module, None)


def _layers_agree(module: Any, attentions: list[Any], device: torch.device) -> bool:
    """Whether each of the modules `attentions` gives the same as eager attention for the same input.

    Logits of a mixture cannot be compared: a difference in rounding may make its router choose other experts. Leaves
    the engine's attention set.
    """
    calls: list[tuple[Any, ...]] = []

    def record_call(attention: Any, arguments: Any, keywords: Any, output: Any) -> None:
        calls.append((attention, arguments, keywords, _first(output)))

    hooks = [attention.register_forward_hook(record_call, with_kwargs=True) for attention in attentions]
    try:
        module.set_attn_implementation("eager")
        with torch.inference_mode():
            tokens, positions = _probe_input(module, device)
            module(input_ids=tokens, position_ids=positions, use_cache=False)
    finally:
        module.set_attn_implementation(NAME)
        for hook in hooks:
            hook.remove()
    with _recording(attentions):
        outputs = [_first(attention(*arguments, **keywords)) for attention, arguments, keywords, _ in calls]
    return len(calls) == len(attentions) and all(
        _within(call[-1], output, _LAYER_ERROR) for call, output in zip(calls, outputs, strict=True)
    )


def _first(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def _probe_input(module: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    vocabulary = module.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(1, _PROBE_TOKENS + 1, device=device).remainder_(vocabulary)[None]
    return tokens, torch.arange(_PROBE_TOKENS, device=device)[None]


def _check_layers(module: Any, recorder: Recorder) -> None:
    family, text_config = module.config.model_type, module.config.get_text_config()
    modules = recorder.modules
    if len(modules) != text_config.num_hidden_layers or len({id(attention) for attention in modules}) != len(modules):
        raise UnsupportedModel(
            f"family {family!r} calls attention {len(modules)} times in {text_config.num_hidden_layers} layers"
        )
    layer_types = getattr(text_config, "layer_types", None)
    slides = getattr(text_config, "use_sliding_window", True)
    for spec in recorder.specs:
        sliding = slides if layer_types is None else layer_types[spec.index] == "sliding_attention"
        if sliding and getattr(text_config, "sliding_window", None) and spec.window is None:
            raise UnsupportedModel(f"family {family!r} does not say which of its layers slide")
