"""Facts about the loaded model, for callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from asyncengine.sampling_params import LOOP, SamplingParams

IN_STEP = tuple(name for name, marks in SamplingParams.declared().items() if LOOP not in marks)
CHAT_SAMPLING = MappingProxyType({"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05})


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the loaded model, for callers."""

    name: str
    vocab_size: int
    max_model_len: int
    """Prompt plus output tokens of one request, at most; of a model that gives vectors or scores, where texts are cut.
    """
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    num_pages: int
    page_size: int
    task: str = "generate"
    """Or "embed", "rerank", "classify", "decide": which calls this model serves."""
    dimensions: int = 0
    """Numbers of an embedder's vectors."""
    pooling: str = ""
    """Pooling of an embedder, in words ("mean, normalized")."""
    prompts: tuple[str, ...] = ()
    """Names of an embedder's prompts."""
    labels: tuple[str, ...] = ()
    """Labels of a classifier."""
    has_tokenizer: bool = True
    has_chat_template: bool = False
    tool_format: str | None = None
    """The format of the model's tool calls ("hermes", "qwen3_coder", ...), "hermes (generic)" where the chat template
    reads no tools and the engine describes them in the prompt; None: chats with tools are refused."""
    template_variables: tuple[str, ...] = ()
    """Variables of the chat template that a chat may set (`enable_thinking`, `reasoning_effort`, ...)."""
    reasons: bool = False
    """The chat template marks reasoning before the answer."""
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values for what requests leave open, under generation_config.json's names: the model's own, and over them the
    engine's `sampling_defaults`."""
    weight_bytes: int = 0
    kv_cache_bytes: int = 0
    state_bytes: int = 0
    """Bytes of one recurrent state, that of all layers after one sequence; 0: the model keeps none."""
    num_states: int = 0
    """Recurrent states that there is memory for: those of running requests, and snapshots."""
    window: int | None = None
    """Every layer sees at most so many tokens, and pages behind them are given back while a request runs. None: some
    layer sees all of them, or there are no pages for more than that; then a request keeps all its pages (of layers that
    have no window, where `num_window_pages` are there for the others)."""
    num_window_pages: int = 0
    """Pages of layers with windows, in a model in which others see everything; page 0 included. They are given back
    while a request runs. 0: `one_pool`."""
    one_pool: str | None = None
    """Why all layers share their pages; None: those with windows have their own."""
    stored: Mapping[str, str] = field(default_factory=dict)
    """Formats of the checkpoint's quantized matrices, by name ("model.layers.0.mlp.up_proj" -> "awq")."""
    fused: tuple[str, ...] = ()
    """Parts of the model that run in a fused form."""
    attention: str = ""
    """Backend of the attention kernels: "compiled", "torch", "flashinfer"; an encoder's, "of whole texts"."""
    no_speculation: str | None = None
    """Why nothing is guessed ahead; None: it is."""
    no_mtp: str | None = "nothing is to be guessed"
    """Why no head of the checkpoint that predicts further tokens guesses; None: one does."""
    no_images: str | None = "the model reads text alone"
    """Why chats may hold no pictures; None: they may."""
    no_routed_experts: str | None = "the model has no experts"
    """Why `return_routed_experts` is refused; None: it is served."""
    num_layers: int = 0
    """Layers whose hidden states `return_hidden_states` may name, by 1 to so many, and `steering_vectors` change."""
    hidden_size: int = 0
    """Numbers in each of them."""
    no_hidden_states: str | None = "the model does not tell"
    """Why both are refused; None: they are served."""
    no_logits_processors: str | None = None
    """Why `logits_processors` are refused; None: they are called."""
    sampling_parameters: tuple[str, ...] = IN_STEP
    """Sampling parameters that this model's steps apply: any other one that is part of steps is refused by name."""
    batch_variance: str | None = None
    """Why an answer may depend on the requests that are computed beside it, in a near tie; None: it does not, to the
    bit (of adapters in bfloat16 that holds for what is written, not for their prompts)."""
    left_out: tuple[str, ...] = ()
    """Parts of the checkpoint that were not read, with the number of their tensors ("vision_tower x 437")."""
    placeholders: Mapping[int, str] = field(default_factory=dict)
    """Tokens in whose place the whole model would put an image or a sound, and which. Prompts with them are refused."""
    tensor_parallel: int = 1
    """Processes that compute the model together. Bytes of weights, KV cache and states are those of all of them."""
    pipeline_parallel: int = 1
    """Processes that compute some of the model's layers each. Bytes as above."""

    @property
    def chat_defaults(self) -> Mapping[str, Any]:
        """Values for what a chat leaves open: `generation_defaults`, or llama.cpp's where they say nothing of sampling,
        as small models lose the thread in the tail of their distribution."""
        own = self.generation_defaults
        says = own.get("do_sample") is False or any(name in own for name in CHAT_SAMPLING)
        return own if says else {**own, **CHAT_SAMPLING}

    @property
    def in_words(self) -> str:
        """One line of what runs how, and of what a machine cannot promise."""
        steady = "answers are the same in any company"
        if self.batch_variance is not None:
            steady = f"answers may depend on those computed beside them, as {self.batch_variance}"
        guesses = "guesses ahead" if self.no_mtp else "guesses ahead, by a head too"
        if self.no_speculation is not None:
            same = self.no_speculation == self.batch_variance
            guesses = "nothing is guessed" + (", for the same reason" if same else f", as {self.no_speculation}")
        forms = f"{', '.join(self.fused)}; attention {self.attention}"
        processes = self.tensor_parallel * self.pipeline_parallel
        device = self.device if processes == 1 else f"{self.device} in {processes} processes"
        return f"{self.name} in {self.dtype} on {device} ({forms}): {steady}; {guesses}"
