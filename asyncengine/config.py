"""Every setting and every limit of an engine, by name. Frozen; each field is also a keyword of `from_pretrained`."""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from asyncengine.checks import MAX_BYTES, MAX_COUNT, as_integer, as_seconds, check_known, knows_its_fields
from asyncengine.errors import InvalidParameter
from asyncengine.kvcache.eviction import STRATEGIES
from asyncengine.policies import POLICIES, Policy, check_policy

STEP_SIZES = 3
"""How many sizes of steps have a cost (`speculation.costs`)."""
DType = Literal["auto", "float32", "bfloat16", "float16"]


@knows_its_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Raises `InvalidParameter` naming the field for a value outside its range."""

    # -- model and execution
    dtype: DType = "auto"
    """Weights and activations; "auto" takes the checkpoint's own."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1"; "auto" picks cuda when there is one."""
    attention_backend: str = "auto"
    """"torch"; "compiled" (CPU, bfloat16 and float32); "flashinfer" (NVIDIA GPU, `asyncengine[cuda]`); "auto" picks
    compiled or flashinfer where they run the model."""
    cuda_graphs: bool = True
    """On a GPU, run decode steps as CUDA graphs where the attention backend allows it."""
    num_threads: int | None = None
    """Threads that compute a step on a CPU, while nothing else wants the cores; None: as many as torch uses in this
    program. A model of less than 32 MiB is computed by one."""
    switch_interval: float | None = 0.0005
    """Seconds after which a Python thread of the program gives the interpreter's lock to one that waits for it, while
    the engine serves (`sys.setswitchinterval`; Python's own 5 ms are longer than many a step). A shorter one, and one
    that the program sets later, stands. None: it is left alone."""
    quantization: Literal["int8", "int4"] | None = None
    """Keep weights in 8 or 4 bits, on a CPU: faster and smaller, less accurate. None: in the model's type."""
    task: Literal["auto", "generate", "embed", "rerank", "classify"] = "auto"
    """What the model is for; "auto": what its files say. "rerank" makes a reranker of a text generator that says "yes"
    and "no" (Qwen3-Reranker)."""
    pooling: str | None = None
    """How an embedder makes one vector of its hidden states, in the place of what its files say: "cls", "mean", "max",
    "mean_sqrt_len_tokens", "weightedmean", "last", or several joined by "+". It makes an embedder of a text generator.
    """
    load_format: str = "auto"
    """"auto": weights are read from safetensors files; "dummy": made up at random from config.json alone, to measure
    speed without a checkpoint."""
    fuse: bool = True
    """False: run every family through transformers' own modules, slower; to compare with."""
    trust_remote_code: bool = False
    """Run code from the model's folder. Off: a model that needs it is refused."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    show_progress: bool = True
    """Progress bar on stderr while loading (only when it is a terminal)."""

    # -- KV cache
    page_size: int = 16
    """Tokens per page."""
    kv_cache_memory: int | str | None = None
    """Bytes of KV memory (or "2GiB", "512MB"); None takes a share of what is free, enough for
    `max_num_seqs` requests of full length at most."""
    kv_cache_dtype: str = "auto"
    """"auto": keys and values are kept in the model's type; "fp8": in 8 bits (float8_e4m3fn), twice as many tokens for
    some loss of accuracy. Needs the flashinfer attention backend."""
    state_memory: int | str | None = None
    """Bytes of memory for recurrent states (or "2GiB"), of models that keep any (gated delta rule, Mamba, short
    convolution): one for each running request, and what is left for snapshots of shared prefixes. None takes a share
    of what is free, enough for `max_num_seqs` running requests and as many snapshots at most."""
    prefix_caching: bool = True
    """Keep the pages of finished requests, and compute a prefix that they share with a later prompt only once."""
    eviction: str = "lru"
    """Which cached pages go first when memory is short."""

    # -- scheduling
    policy: str | Policy = "fcfs"
    """Order in which waiting requests are admitted, and which running one gives way: a name, or an object like
    `asyncengine.Policy`. Each engine works with a copy of its own."""
    max_num_seqs: int = 256
    """Most requests running at once."""
    max_num_batched_tokens: int = 1024
    """Most tokens computed in one step (prompt chunks and decodes together)."""
    long_prefill_token_threshold: int | None = None
    """A prompt takes at most this many tokens of a step that others share; None: no such cap."""
    max_model_len: int | None = None
    """Prompt plus output, tokens; None takes the model's, cut to what the KV cache holds. Models with "longrope" or
    "dynamic" positions use the frequencies for this length throughout (docs/contract.md, 5)."""
    max_passes: int = 64
    """How often a waiting request may be passed over by later ones before it goes first."""
    admission_lookahead: int = 64
    """How many waiting requests that cannot start yet (adapter, shared prefix) a step looks past."""
    max_steps_in_flight: int | None = None
    """Steps launched before the first one's result is applied. 2 is overlap scheduling: the next step is planned and
    launched while one runs, and an end of sequence is noticed one step late. None: 2 on a GPU, 1 on CPU, which gains
    nothing."""

    # -- speculation
    speculation: Literal["auto", "lookup", "off"] = "auto"
    """Whether steps compute guesses of the next tokens, found in the request's own text, in its `prediction` and in
    earlier outputs. No token changes, only the time it takes. "auto": on a CPU whose kernels give the same numbers in
    any company (`info` says why not); "lookup": on a GPU as well, where sums depend on what is computed together
    anyway; "off": nobody guesses."""
    speculation_tokens: int = 15
    """Guesses of a request in one step, at most."""
    speculation_with_adapters: bool | None = None
    """Whether requests with adapters are guessed for, too. What an adapter adds to a prompt is summed as its company
    asks for, so that a request may get other tokens in other company, with guesses and without. None: in float32, where
    that is hardly ever seen."""
    speculation_memory: int | str = "16MiB"
    """Bytes of finished outputs kept to guess from, for requests of the same adapter and cache salt."""
    draft_model: str | None = None
    """A smaller model with the same vocabulary that guesses as well: a folder, a hub id, or "demo/draft". On a CPU."""
    speculation_costs: tuple[float, ...] | None = None
    """Seconds of steps of 1, 8 and 32 tokens, by which it is decided how many guesses a step is worth. None: they are
    measured when the engine is built."""
    draft_costs: tuple[float, ...] | None = None
    """Seconds of the draft model's steps of 1, 8 and 32 tokens. None: they are measured."""

    # -- admission and deadlines
    max_queued_requests: int | None = None
    """Waiting samples (a request with n counts n) before submit says QueueFull; 0 refuses what cannot start at once."""
    max_queued_tokens: int | None = None
    """Prompt tokens of waiting requests before submit says QueueFull."""
    when_full: Literal["error", "wait"] = "error"
    """At a full queue: raise QueueFull, or await a place."""
    waiting_timeout: float | None = None
    """Seconds until the first step of a request; then it ends with reason "timeout"."""
    request_timeout: float | None = None
    """Seconds from submit to end."""
    inter_token_timeout: float | None = None
    """Seconds between two output tokens."""
    step_soft_limit: float = 60.0
    """A step longer than this is reported (log and event)."""
    step_hard_limit: float = 600.0
    """A step longer than this ends the engine: every stream gets EngineDead."""

    # -- limits of one request
    max_chat_chars: int = 4_000_000
    """Characters of a chat, before and after the template."""
    max_n: int = 128
    """Largest `n`, samples of one prompt."""
    max_stop_strings: int = 64
    """Most stop strings of a request."""
    max_stop_string_length: int = 1024
    """Characters of a stop string, at most."""
    max_stop_token_ids: int = 1024
    """Most stop token ids of a request."""
    max_top_logprobs: int = 50
    """Largest `top_logprobs`, alternatives at each position."""
    max_logit_bias: int = 1024
    """Most token ids in a request's `logit_bias`."""

    # -- grammars
    grammar_backend: str = "llguidance"
    """What compiles grammars that do not say: "llguidance" or "outlines_core"; "none": refuse grammars and save the
    time and memory of preparing for them."""
    grammar_timeout: float = 10.0
    """Seconds a request waits for its grammar to compile, from when a worker has begun with it."""
    grammar_workers: int = 2
    """Threads that compile grammars."""
    grammar_cache_memory: int | str = "256MiB"
    """Bytes of compiled grammars kept for reuse."""
    max_pending_grammars: int = 1024
    """Grammars waiting to be compiled; more are refused with QueueFull."""
    max_grammar_bytes: int = 1024 * 1024
    """Size of one grammar's text."""
    max_grammar_depth: int = 64
    """Nesting of one grammar's schema."""
    jump_forward: bool | None = None
    """Append tokens that a grammar forces without sampling them, and compute them together in the next step. A step
    that is launched by then has computed the request's row in vain. None: where one step is in flight at a time."""
    tool_format: str = "auto"
    """How the model writes tool calls, such as "hermes" or "qwen3_coder" (the how-to on tools has the names); "auto"
    reads it off the template."""

    # -- adapters (LoRA)
    adapters: tuple[tuple[str, str], ...] | Mapping[str, str] = ()
    """Adapters loaded at construction: name -> folder of a PEFT checkpoint. ("demo/NAME": one of the demo model's.)"""
    adapter_root: str | None = None
    """Adapters lie inside this folder or are refused. Those in it are loaded at construction, each under the name of
    its folder; one that does not fit the model is left out with a warning."""
    max_loras: int = 8
    """Distinct adapters among all running requests, at most; each has a slot of device memory."""
    max_lora_rank: int = 64
    """Largest rank of an adapter. Memory and time follow the largest rank that was loaded, not this limit."""
    adapter_memory: int | str = "1GiB"
    """Bytes of adapters kept in host memory. Those that no request uses are dropped, least recently used first, and
    read again when they are needed."""
    adapter_workers: int = 2
    """Threads that read adapters."""

    # -- hosting and checks
    uvloop: bool = False
    """Hosted engines: run the engine's own loop on uvloop (must be installed)."""
    check_every: int = 1000
    """Steps between two conservation checks while busy (they always run when idle)."""
    preempt_every: int | None = None
    """Testing: force a preemption every so many steps."""

    def __post_init__(self) -> None:
        for name, low in _MINIMUM.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            object.__setattr__(self, name, as_integer(name, value, low, _MAXIMUM.get(name, MAX_COUNT)))
        for name in _SECONDS:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            object.__setattr__(self, name, as_seconds(name, value))
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if name == "policy":
                check_policy(value)
            elif not isinstance(value, str) or value not in choices:
                raise InvalidParameter(name, "must be one of " + ", ".join(map(repr, choices)), value)
        for name in _NAMES:
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name not in _OPTIONAL):
                raise InvalidParameter(name, "must be a str", value)
        for name in _SWITCHES:
            value = getattr(self, name)
            if not isinstance(value, bool) and (value is not None or name not in _OPTIONAL):
                raise InvalidParameter(name, "must be True or False", value)
        for name in ("kv_cache_memory", "state_memory"):
            object.__setattr__(self, name, parse_bytes(name, getattr(self, name)))
        for name in ("grammar_cache_memory", "adapter_memory", "speculation_memory"):
            value = parse_bytes(name, getattr(self, name))
            object.__setattr__(self, name, 0 if value is None else value)
        for name in ("speculation_costs", "draft_costs"):
            object.__setattr__(self, name, _parse_costs(name, getattr(self, name)))
        if self.draft_model is not None:
            object.__setattr__(self, "draft_model", _parse_path("draft_model", self.draft_model, _MODEL))
            if self.speculation != "auto":
                raise InvalidParameter("draft_model", f'needs speculation="auto", not "{self.speculation}"')
        object.__setattr__(self, "adapters", _parse_adapters(self.adapters))
        if self.adapter_root is not None:
            object.__setattr__(self, "adapter_root", _parse_path("adapter_root", self.adapter_root))

    @property
    def most_ahead(self) -> int:
        """Tokens that the steps in flight compute, at most."""
        return self.max_num_batched_tokens * (self.max_steps_in_flight or 1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from loose keywords; an unknown name is refused with the nearest known one."""
        check_known(values, [f.name for f in fields(cls)])
        return cls(**values)

    def replace(self, **changes: Any) -> EngineConfig:
        return replace(self, **changes)


_OPTIONAL = {
    "num_threads", "switch_interval", "long_prefill_token_threshold", "max_model_len", "max_queued_requests",
    "max_queued_tokens", "jump_forward", "max_steps_in_flight", "preempt_every", "waiting_timeout",
    "request_timeout", "inter_token_timeout", "quantization", "revision", "pooling", "speculation_with_adapters",
}  # fmt: skip
_SECONDS = (
    "waiting_timeout", "request_timeout", "inter_token_timeout", "step_soft_limit", "step_hard_limit",
    "grammar_timeout", "switch_interval",
)  # fmt: skip
_SWITCHES = (
    "fuse", "cuda_graphs", "trust_remote_code", "show_progress", "prefix_caching", "uvloop", "jump_forward",
    "speculation_with_adapters",
)  # fmt: skip
_NAMES = ("device", "revision", "pooling")
_MINIMUM = {
    "num_threads": 1, "page_size": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "long_prefill_token_threshold": 1,
    "max_model_len": 2, "max_passes": 1, "admission_lookahead": 0, "max_steps_in_flight": 1, "max_queued_requests": 0,
    "max_queued_tokens": 0, "max_chat_chars": 1, "max_n": 1, "max_stop_strings": 0, "max_stop_string_length": 1,
    "max_stop_token_ids": 0, "max_top_logprobs": 0, "max_logit_bias": 0, "check_every": 1, "preempt_every": 1,
    "grammar_workers": 1, "max_pending_grammars": 1, "max_grammar_bytes": 1, "max_grammar_depth": 1,
    "max_loras": 1, "max_lora_rank": 1, "adapter_workers": 1, "speculation_tokens": 1,
}  # fmt: skip
_MAXIMUM = {
    "num_threads": 1024, "page_size": 2**16, "max_num_seqs": 2**16, "max_num_batched_tokens": 2**24,
    "max_steps_in_flight": 64, "grammar_workers": 1024, "adapter_workers": 1024, "max_grammar_depth": 4096,
    "max_loras": 4096, "max_lora_rank": 2**16, "speculation_tokens": 31,
}  # fmt: skip
"""Where memory or threads are taken for as many; others count something and may be as large as a count can be."""
CHOICES: dict[str, Collection[str]] = {  # a policy may be an object as well
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "attention_backend": ("auto", "torch", "compiled", "flashinfer"),
    "task": ("auto", "generate", "embed", "rerank", "classify"),
    "load_format": ("auto", "dummy"),
    "quantization": ("int8", "int4"),
    "speculation": ("auto", "lookup", "off"),
    "kv_cache_dtype": ("auto", "fp8"),
    "eviction": STRATEGIES,
    "policy": POLICIES,
    "when_full": ("error", "wait"),
    "grammar_backend": ("llguidance", "outlines_core", "none"),
    "tool_format": (
        "auto", "hermes", "llama3", "mistral", "json", "apertus", "command", "command_r", "deepseek_v3",
        "deepseek_v31", "deepseek_v32", "deepseek_v4", "functionary", "functiongemma", "gemma4", "gigachat", "hy3",
        "glm", "granite", "harmony", "kimi_k2", "lfm2", "minicpm5", "minimax_m2", "nemotron", "olmo3", "phi4_mini",
        "pythonic", "qwen3_coder", "seed_oss", "step3",
    ),
}  # fmt: skip

_UNITS = {"B": 1} | {
    f"{letter}{kind}": base**power
    for kind, base in (("B", 1000), ("iB", 1024))
    for power, letter in enumerate("KMGTP", 1)
}
_BYTES = re.compile(r"([^a-z]*(?:e[+-]?\d+)?)([a-z]*)", re.IGNORECASE)


def parse_bytes(name: str, value: Any) -> int | None:
    """ "2GiB" -> 2147483648; integers and None pass through. Raises `InvalidParameter`."""
    if value is None:
        return None
    if isinstance(value, numbers.Integral):
        return as_integer(name, value, 1, MAX_BYTES)
    if isinstance(value, str):
        sizes = {unit.lower(): size for unit, size in _UNITS.items()}
        found = _BYTES.fullmatch(value.strip())
        try:
            number = float(found[1]) * sizes[found[2].lower() or "b"] if found else 0.0
        except (ValueError, KeyError):
            number = 0.0
        if 1 <= number <= MAX_BYTES:
            return int(number)
    units = ", ".join(_UNITS)
    limit = f'must be a positive number of bytes below 2**63, as an integer or like "2GiB" (units: {units})'
    raise InvalidParameter(name, limit, value)


def _parse_adapters(value: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of name and folder, so that a configuration can be compared and hashed."""
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        named = {name: _parse_path("adapters", path) for name, path in pairs}
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidParameter):
            raise
        raise InvalidParameter("adapters", "must map names to folders", value) from None
    if not all(isinstance(name, str) for name in named):
        raise InvalidParameter("adapters", "must map names to folders", value)
    return tuple(sorted(named.items()))


def _parse_costs(name: str, value: Any) -> tuple[float, ...] | None:
    if value is None:
        return None
    fit = isinstance(value, (tuple, list)) and len(value) == STEP_SIZES
    if not fit or not all(isinstance(each, (int, float)) and 0 < each < math.inf for each in value):
        raise InvalidParameter(name, f"must be {STEP_SIZES} positive numbers, or None", value)
    return tuple(float(each) for each in value)


_MODEL = 'a folder, a hub id or "demo/draft"'


def _parse_path(name: str, value: Any, what: str = "the path of a folder") -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path.strip():
        raise InvalidParameter(name, f"must be {what}", value)
    return path


def default_threads() -> int:
    """CPUs this process may run on (not the machine's count: containers and taskset narrow it)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
