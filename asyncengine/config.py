"""Every setting and every limit of an engine, by name. Frozen; each field is also a keyword of `from_pretrained`.

A field's type carries its limits (`asyncengine.checks.Settings`), the text below it says what it does, and its class
is the group under which the command line and docs/settings.md show it. A function that needs one group takes that.
"""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from asyncengine import checks
from asyncengine.errors import InvalidParameter
from asyncengine.grammar.settings import GrammarSettings
from asyncengine.policies import POLICIES, Policy, as_policy
from asyncengine.sampling_params import OPEN_PARAMETERS, SamplingParams

STEP_SIZES = 4
"""The number of sizes of steps that have a cost (`speculation.costs`)."""
DType = Literal["auto", "float32", "bfloat16", "float16"]

CHAT_TEMPLATES = ("chatml", "gemma", "llama2", "llama3", "mistral", "phi3", "vicuna", "zephyr")
"""Names of templates that come with the engine: text/templates has the files."""
LEAST_STORE = 2**20
"""The smallest `kv_cache_disk`."""
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600}
_TIME = re.compile(r"(-1|\d{1,10}(?:\.\d{1,10})?)([smh]?)")
_LONGEST_TEMPLATE = 2**20
"""Characters read of a template's file; a valid one has fewer."""


def parse_keep_alive(name: str, value: Any) -> float:
    """ "5m" -> 300.0; numbers are seconds, -1 is never (infinite). Raises `InvalidParameter`."""
    match = _TIME.fullmatch(value.strip()) if isinstance(value, str) else None
    number = float(match[1]) * _SECONDS[match[2]] if match else value
    if not isinstance(number, bool) and isinstance(number, numbers.Real) and number in (-1, math.inf):
        return math.inf
    try:
        return checks.as_number(name, number, 0.0, checks.MAX_SECONDS)
    except InvalidParameter:
        limit = 'must be seconds without use (at most 1e9), a text like "90s", "5m" or "1h", or -1 for never'
        raise InvalidParameter(name, limit, value) from None


def _adapters(name: str, value: Any) -> tuple[tuple[str, str], ...]:
    """Pairs of name and folder, so that a configuration can be compared and hashed."""
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        named = {key: _path(name, path) for key, path in pairs}
    except (TypeError, ValueError) as error:
        if isinstance(error, InvalidParameter):
            raise
        raise InvalidParameter(name, "must map names to folders", value) from None
    if not all(isinstance(key, str) for key in named):
        raise InvalidParameter(name, "must map names to folders", value)
    return tuple(sorted(named.items()))


def _sampling_defaults(name: str, value: Any) -> tuple[tuple[str, float], ...]:
    """Pairs of a sampling parameter and its value, checked: of a mapping, or of a text as the command line has it."""
    try:
        if isinstance(value, str):
            pairs = [pair.strip().partition("=") for pair in value.split(",")]
            value = {key: int(number) if key == "top_k" else float(number) for key, _, number in pairs}
        values = dict(value)
        if unknown := [key for key in values if key not in OPEN_PARAMETERS]:
            raise InvalidParameter.unknown(str(unknown[0]), OPEN_PARAMETERS)
        checked = SamplingParams(**values)
    except InvalidParameter as error:
        raise InvalidParameter(name, str(error)) from None
    except (TypeError, ValueError):
        limit = 'must map parameters to numbers, or be like "temperature=0.7,top_k=20"'
        raise InvalidParameter(name, limit, value) from None
    return tuple((key, getattr(checked, key)) for key in sorted(values))


def _addresses(name: str, value: Any) -> tuple[str, ...]:
    addresses = tuple(value.split(",")) if isinstance(value, str) else checks.as_items(name, value)
    for address in addresses:
        host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
        if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
            raise InvalidParameter(name, 'must be addresses "HOST:PORT"', address)
    return addresses


def _costs(name: str, value: Any) -> tuple[float, ...]:
    fit = isinstance(value, (tuple, list)) and len(value) in (STEP_SIZES - 1, STEP_SIZES)
    if not fit or not all(isinstance(cost, (int, float)) and 0 < cost < math.inf for cost in value):
        raise InvalidParameter(name, f"must be {STEP_SIZES - 1} or {STEP_SIZES} positive numbers, or None", value)
    return tuple(float(cost) for cost in value)


def _path(name: str, value: Any, noun: str = "the path of a folder") -> str:
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if not isinstance(path, str) or not path.strip():
        raise InvalidParameter(name, f"must be {noun}", value)
    return path


def _chat_template(name: str, value: Any) -> str:
    """The text of a template, however it was named: a file is read here, so that equal settings give equal chats."""
    text = os.fspath(value) if isinstance(value, (str, os.PathLike)) else None
    if isinstance(text, str) and "{{" not in text and "{%" not in text:
        bundled = f"{os.path.dirname(__file__)}/text/templates/{text}.jinja"
        try:
            with open(bundled if text in CHAT_TEMPLATES else os.path.expanduser(text), encoding="utf-8") as file:
                text = file.read(_LONGEST_TEMPLATE)
        except (OSError, ValueError):
            text = None
    if not isinstance(text, str) or not ("{{" in text or "{%" in text):
        limit = f"must be a Jinja template, a file with one, or a name: {', '.join(CHAT_TEMPLATES)}"
        raise InvalidParameter(name, limit, value)
    return text


def _store_folder(name: str, value: Any) -> str | bool:
    noun = "the path of a folder, or True for the user's cache folder"
    return True if value is True or (isinstance(value, str) and value == "True") else _path(name, value, noun)


def _store_bytes(name: str, value: Any) -> int:
    nbytes = checks.parse_bytes(name, value) or 0
    if nbytes < LEAST_STORE:
        raise InvalidParameter(name, f"must be at least {LEAST_STORE} bytes", value)
    return nbytes


ChatTemplate = Annotated[str, _chat_template]
Projector = Annotated[str, partial(_path, noun="the path of a GGUF file")]
StoreFolder = Annotated[str | bool, _store_folder]
StoreBytes = Annotated[int | str, _store_bytes]
SamplingDefaults = Annotated[tuple[tuple[str, float], ...] | Mapping[str, float] | str, _sampling_defaults]
Costs = Annotated[tuple[float, ...], _costs]
Model = Annotated[str, partial(_path, noun='a folder, a hub id or "demo/draft"')]
Adapters = Annotated[tuple[tuple[str, str], ...] | Mapping[str, str], _adapters]


@dataclass(frozen=True, kw_only=True)
class ModelSettings(checks.Settings):
    """Model and execution."""

    dtype: DType = "auto"
    """Type of weights and activations; "auto" takes the checkpoint's own."""
    device: str = "auto"
    """"cpu", "cuda", "cuda:1"; "auto" picks cuda when there is one."""
    attention_backend: Annotated[str, checks.one_of(("auto", "torch", "compiled", "flashinfer"))] = "auto"
    """"torch"; "compiled" (CPU, bfloat16 and float32); "flashinfer" (NVIDIA GPU, `asyncengine[cuda]`); "auto" picks
    compiled or flashinfer where they run the model."""
    cuda_graphs: bool = True
    """On a GPU, run decode steps as CUDA graphs where the attention backend allows it."""
    num_threads: checks.Threads | None = None
    """Threads that compute a step on a CPU, while nothing else wants the cores; None: as many as torch uses in this
    program. A model of less than 32 MiB is computed by one."""
    tensor_parallel: Annotated[int, checks.integer_in(1, 64)] = 1
    """Processes among which the model's weights are divided (docs/howto/tensor_parallel.md). They share `num_threads`,
    `kv_cache_memory` and `state_memory`. On a CPU answers do not depend on it, to the bit; on GPUs, each has one."""
    pipeline_parallel: Annotated[int, checks.integer_in(1, 64)] = 1
    """Processes among which the model's layers are divided, on a CPU (docs/howto/pipeline_parallel.md): as many steps,
    of different requests, are in flight. They share `num_threads`, `kv_cache_memory` and `state_memory`. Answers do not
    depend on it, to the bit, but with torch's attention (`info.batch_variance`)."""
    stage_hosts: Annotated[tuple[str, ...], _addresses] = ()
    """Addresses "HOST:PORT" (or one text, with commas) of the machines that have the stages behind the first, one each:
    where `asyncengine stage` listens. Each machine has `num_threads` then. Empty: all stages are on this machine."""
    quantization: Literal["int8", "int4"] | None = None
    """Keep weights in 8 or 4 bits: faster and smaller, less accurate. None: in the model's type."""
    activations: Literal["auto", "exact"] = "auto"
    """Inputs of products with quantized weights on a CPU. "exact": as they are, and prompts are several times slower;
    "auto": rounded to 8 bits, unless the weights are stored quantized and dtype is "float32"."""
    task: Literal["auto", "generate", "embed", "rerank", "classify"] = "auto"
    """The model's use; "auto": as its files say. "rerank" makes a reranker of a text generator that says "yes" and "no"
    (Qwen3-Reranker)."""
    pooling: str | None = None
    """The pooling by which an embedder makes one vector of its hidden states, in the place of what its files say:
    "cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "last", or several joined by "+". It makes an embedder
    of a text generator."""
    weight_cache_dir: StoreFolder | None = True
    """On a CPU, the folder in which weights are kept as its kernels read them, so that later loads are quick and all
    processes hold them once (docs/howto/first_start.md); True: one in the user's cache folder. None: none are kept."""
    weight_cache_disk: StoreBytes = "20GiB"
    """Bytes of all files in that folder, at most: those used last stay, and a larger model is not kept."""
    chat_template: ChatTemplate | None = None
    """The chat template, in place of the model's own: its text (Jinja), a file with it, or the name of a usual one:
    "chatml", "gemma", "llama2", "llama3", "mistral", "phi3", "vicuna", "zephyr". None: the model's."""
    load_format: Annotated[str, checks.one_of(("auto", "dummy"))] = "auto"
    """"auto": weights are read from safetensors files; "dummy": made up at random from config.json alone, to measure
    speed without a checkpoint."""
    trust_remote_code: bool = False
    """Run code from the model's folder. Off: a model that needs it is refused."""
    revision: str | None = None
    """Branch, tag or commit of a hub id."""
    show_progress: bool = True
    """Progress on stderr while loading and embedding: a bar, or a line in 10 s where it is no terminal."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pipeline_parallel > 1 and self.device.startswith("cuda"):
            raise InvalidParameter("pipeline_parallel", "on CUDA is not there yet", self.pipeline_parallel)
        if self.stage_hosts and len(self.stage_hosts) != self.pipeline_parallel - 1:
            raise InvalidParameter(
                "stage_hosts", f"must be {self.pipeline_parallel - 1}, one for each stage behind the first",
                self.stage_hosts,
            )  # fmt: skip
        if self.processes > 64:
            raise InvalidParameter("pipeline_parallel", "times tensor_parallel must be at most 64", self.processes)

    @property
    def processes(self) -> int:
        """Number of the processes that compute the model together: ranks of all stages."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def parallel_field(self) -> str:
        """Name of the field that asks for several processes."""
        return "pipeline_parallel" if self.pipeline_parallel > 1 else "tensor_parallel"


@dataclass(frozen=True, kw_only=True)
class MemorySettings(checks.Settings):
    """KV cache and recurrent states."""

    page_size: Annotated[int, checks.integer_in(1, 2**16)] = 16
    """Tokens per page."""
    kv_cache_memory: checks.Memory | None = None
    """Bytes of KV memory (or "2GiB", "512MB"); None takes a share of what is free, enough for
    `max_num_seqs` requests of full length at most."""
    kv_cache_dtype: Annotated[str, checks.one_of(("auto", "int8", "fp8"))] = "auto"
    """"auto": keys and values are kept in the model's type. In 8 bits twice as many tokens fit, for some loss of
    accuracy: "int8" on a CPU, with a scale for each token and head (the compiled attention backend, pages of a multiple
    of 16 tokens); "fp8" (float8_e4m3fn) on a GPU (the flashinfer attention backend)."""
    state_memory: checks.Memory | None = None
    """Bytes of memory for recurrent states (or "2GiB"), of models that keep any (gated delta rule, Mamba, short
    convolution): one for each running request, and what is left for snapshots of shared prefixes. None takes a share
    of what is free, enough for `max_num_seqs` running requests and as many snapshots at most."""
    prefix_caching: bool = True
    """Keep the pages of finished requests, and compute a prefix that they share with a later prompt only once."""
    eviction: Annotated[str, checks.one_of(("lru", "lfu", "fifo", "priority"))] = "lru"
    """The rule by which cached pages go when memory is short."""
    kv_cache_dir: StoreFolder | None = None
    """Folder in which the prefix cache is kept, so that it survives the process (docs/howto/persistence.md); True: one
    in the user's cache folder. Needs `prefix_caching`, on a CPU. None: it is kept in memory alone."""
    kv_cache_disk: StoreBytes = "20GiB"
    """Bytes of all files in that folder, at most; the oldest go first."""
    kv_cache_write: Annotated[str, checks.one_of(("through", "on_eviction"))] = "through"
    """When a page goes there: as soon as it is computed ("through"), or when it is evicted from memory, or the engine
    falls asleep or closes ("on_eviction"): fewer bytes are written, and a process that is killed leaves less behind."""
    kv_cache_salted: bool = False
    """Keep prefixes of requests with a `cache_salt` there, too."""


@dataclass(frozen=True, kw_only=True)
class BatchingSettings(checks.Settings):
    """Batching and scheduling."""

    policy: Annotated[str | Policy, partial(as_policy, choices=POLICIES)] = "fcfs"
    """Order in which waiting requests are admitted, and which running one gives way: a name, or an object like
    `asyncengine.Policy`. Each engine works with a copy of its own."""
    max_num_seqs: Annotated[int, checks.integer_in(1, 2**16)] = 256
    """Most requests running at once."""
    max_num_batched_tokens: Annotated[int, checks.integer_in(1, 2**24)] = 1024
    """Most tokens computed in one step (prompt chunks and decodes together)."""
    long_prefill_token_threshold: checks.Positive | None = None
    """A prompt takes at most this many tokens of a step that others share; None: no such cap."""
    step_time_target: checks.Seconds | None = 0.05
    """Seconds that a step aims at which computes a prompt while other requests generate: it takes as many of the
    prompt's tokens as fit, by the speed of the last steps. Up to four prompts at once have this time each, and prompts
    always have half of the time. None: as many as `max_num_batched_tokens` allows, as while nobody generates."""
    max_model_len: Annotated[int, checks.integer_in(2)] | None = None
    """Prompt plus output, tokens; None takes the model's, cut to what the KV cache holds. Models with "longrope" or
    "dynamic" positions use the frequencies for this length throughout (docs/contract.md, 5)."""
    max_passes: checks.Positive = 64
    """Most times that a waiting request is passed over by later ones before it goes first."""
    admission_lookahead: checks.Count = 64
    """Waiting requests that cannot start yet (adapter, shared prefix) and that a step looks past, at most."""
    max_steps_in_flight: Annotated[int, checks.integer_in(1, 64)] | None = None
    """Steps launched before the first one's result is applied. 2 is overlap scheduling: the next step is planned and
    launched while one runs, and an end of sequence is noticed one step late. None: 2 on a GPU, 1 on CPU, which gains
    nothing, and with `pipeline_parallel` as many as there are stages, which is the most."""

    @property
    def most_ahead(self) -> int:
        """Tokens that the steps in flight compute, at most."""
        return self.max_num_batched_tokens * (self.max_steps_in_flight or 1)


@dataclass(frozen=True, kw_only=True)
class SpeculationSettings(checks.Settings):
    """Speculation."""

    speculation: Literal["auto", "lookup", "off"] = "auto"
    """Whether steps compute guesses of the next tokens, found in the request's own text, in its `prediction` and in
    earlier outputs. No token changes, only the time it takes. "auto": on a CPU whose kernels give the same numbers in
    any company (`info` says why not); "lookup": on a GPU as well, where sums depend on what is computed together
    anyway; "off": nothing is guessed."""
    speculation_tokens: Annotated[int, checks.integer_in(1, 31)] = 15
    """Guesses of a request in one step, at most."""
    speculation_with_adapters: bool | None = None
    """Whether requests with adapters are guessed for, too. What an adapter adds to a prompt is summed as its company
    asks for, so that a request may get other tokens in other company, with guesses and without. None: in float32, where
    that is hardly ever seen."""
    speculation_memory: checks.CacheMemory = "16MiB"
    """Bytes of finished outputs kept to guess from, for requests of the same adapter and cache salt. None: none."""
    draft_model: Model | None = None
    """A smaller model with the same vocabulary that guesses as well, or an EAGLE-3 head of this model: a folder, a hub
    id, or "demo/draft". On a CPU."""
    mtp: bool = True
    """Whether a head of the checkpoint that predicts further tokens (multi-token prediction) guesses, if it has one.
    Not beside a draft model, and on a CPU."""
    speculation_costs: Costs | None = None
    """Seconds of steps of 1, 2, 8 and 32 tokens, or of 1, 8 and 32, by which it is decided how many guesses a step is
    worth. None: they are measured when the engine is built."""
    draft_costs: Costs | None = None
    """Seconds of the draft model's steps, likewise. None: they are measured."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_model is not None and self.speculation != "auto":
            raise InvalidParameter("draft_model", f'needs speculation="auto", not "{self.speculation}"')


@dataclass(frozen=True, kw_only=True)
class AdapterSettings(checks.Settings):
    """Adapters (LoRA)."""

    adapters: Adapters = ()
    """Adapters loaded at construction: name -> folder of a PEFT checkpoint. ("demo/NAME": one of the demo model's.)"""
    adapter_root: Annotated[str, _path] | None = None
    """Adapters lie inside this folder or are refused. Those in it are loaded at construction, each under the name of
    its folder; one that does not fit the model is left out with a warning."""
    max_loras: Annotated[int, checks.integer_in(1, 4096)] = 8
    """Distinct adapters among all running requests, at most; each has a slot of device memory."""
    max_lora_rank: Annotated[int, checks.integer_in(1, 2**16)] = 64
    """Largest rank of an adapter. Memory and time follow the largest rank that was loaded, not this limit."""
    adapter_memory: checks.CacheMemory = "1GiB"
    """Bytes of adapters kept in host memory. Those that no request uses are dropped, least recently used first, and
    read again when they are needed. None: none, and every adapter is refused."""
    adapter_workers: checks.Threads = 2
    """Threads that read adapters."""


@dataclass(frozen=True, kw_only=True)
class ImageSettings(checks.Settings):
    """Pictures."""

    images: Literal["auto", "off"] = "auto"
    """"auto": the vision tower is loaded where the model has one that can be read here (`info.no_images` says why not),
    and chats may hold pictures; "off": it is left out, and takes no memory."""
    mmproj: Projector | None = None
    """The image part of a GGUF model: a GGUF file, too. None: the one beside it with "mmproj" in its name."""
    image_cache_memory: checks.CacheMemory = "256MiB"
    """Bytes of encoded pictures kept for requests that name them again. None: only those that are being computed."""
    max_images: checks.Count = 16
    """Most pictures of a request."""
    max_image_bytes: Annotated[int, checks.integer_in(1, checks.MAX_BYTES)] = 20 * 2**20
    """Bytes of a picture's file, at most."""
    max_image_pixels: checks.Positive = 2**25
    """Pixels of a picture, at most: three bytes each while its request is prepared."""
    max_image_side: checks.Positive = 8192
    """Pixels of a picture's width and of its height, at most."""


@dataclass(frozen=True, kw_only=True)
class RequestSettings(checks.Settings):
    """Queue, timeouts and limits of requests."""

    sampling_defaults: SamplingDefaults | None = None
    """Sampling parameters that requests leave open, such as {"temperature": 0.7, "top_k": 20} or, as a flag,
    "temperature=0.7,top_k=20"; they go before the model's own. None: the model's; where it has none, chats take
    llama.cpp's (`info.chat_defaults`) and texts are drawn from the model's whole distribution."""
    max_queued_requests: checks.Count | None = None
    """Waiting samples (a request with n counts n) before submit says QueueFull; 0 refuses what cannot start at once."""
    max_queued_tokens: checks.Count | None = None
    """Prompt tokens of waiting requests before submit says QueueFull."""
    when_full: Literal["error", "wait"] = "error"
    """At a full queue: raise QueueFull, or await a place."""
    waiting_timeout: checks.Seconds | None = None
    """Seconds until the first step of a request; then it ends with reason "timeout"."""
    request_timeout: checks.Seconds | None = None
    """Seconds from submit to end."""
    inter_token_timeout: checks.Seconds | None = None
    """Seconds between two output tokens."""
    max_chat_chars: checks.Positive = 4_000_000
    """Characters of a chat, before and after the template."""
    max_n: checks.Positive = 128
    """Largest `n`, samples of one prompt, and most streams that `fork` makes."""
    max_stop_strings: checks.Count = 64
    """Most stop strings of a request."""
    max_stop_string_length: checks.Positive = 1024
    """Characters of a stop string, at most."""
    max_stop_token_ids: checks.Count = 1024
    """Most stop token ids of a request."""
    max_top_logprobs: checks.Count = 50
    """Largest `top_logprobs`, alternatives at each position."""
    max_logit_bias: checks.Count = 1024
    """Most token ids in a request's `logit_bias`."""


@dataclass(frozen=True, kw_only=True)
class AdvancedSettings(checks.Settings):
    """Advanced."""

    fuse: bool = True
    """False: run every family through transformers' own modules, slower; to compare with."""
    switch_interval: checks.Seconds | None = 0.0005
    """Seconds after which a Python thread of the program gives the interpreter's lock to one that waits for it, while
    the engine serves (`sys.setswitchinterval`; Python's own 5 ms are longer than many a step). A shorter one, and one
    that the program sets later, stands. None: it is left alone."""
    uvloop: bool = False
    """Hosted engines: run the engine's own loop on uvloop (must be installed)."""
    step_soft_limit: checks.Seconds = 60.0
    """Seconds after which a step is reported (log and event)."""
    step_hard_limit: checks.Seconds = 600.0
    """Seconds after which a step ends the engine: every stream gets EngineDead."""
    check_every: checks.Positive = 1000
    """Steps between two conservation checks while busy (they always run when idle)."""
    preempt_every: checks.Positive | None = None
    """Testing: force a preemption every so many steps."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(
    AdvancedSettings, RequestSettings, ImageSettings, AdapterSettings, GrammarSettings, SpeculationSettings,
    BatchingSettings, MemorySettings, ModelSettings,
):  # fmt: skip
    """Settings of one engine. Raises `InvalidParameter` naming the field for a value outside its range."""


GROUPS = {(group.__doc__ or group.__name__).rstrip("."): group for group in reversed(EngineConfig.__bases__)}
"""Title -> group, as they are shown: a dataclass collects its fields from its last base on."""


def engine_config(config: EngineConfig | None, settings: Mapping[str, Any]) -> EngineConfig:
    """`config` with `settings` on top. Raises `InvalidParameter` for an unknown one."""
    if config is None:
        return EngineConfig.from_dict(settings)
    if not isinstance(config, EngineConfig):
        raise InvalidParameter("config", "must be an EngineConfig", config)
    return config.replace(**settings) if settings else config
