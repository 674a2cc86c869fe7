"""A tiny chat model made on the fly, one shared engine for the whole folder, and what tests ask of it.

The model is random. Its output rows for special tokens and for bytes that are not printable ASCII are zero, so greedy
answers are printable, never empty, and end only by length or by a stop the test chose.
"""

from __future__ import annotations

import asyncio
import inspect
import string
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import transformers
from langchain_core.messages import AIMessageChunk
from support.fake_engine import PATIENCE, posted, until
from support.peft_checkpoints import make_peft
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from asyncengine import AsyncEngine, EngineHandle, SamplingParams, shared_engine
from asyncengine.events import StepDone
from asyncengine.integrations.langchain import AsyncEngineLLM, ChatAsyncEngine

CONFIG: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 64, "kv_cache_memory": "32MiB", "num_threads": 1}
"""Settings of the shared engine; model objects with equal ones share it."""
CONTEXT = 1024
TOKENS = 10
"""Length of the answers that adapters are told apart by."""
LONG = {"max_tokens": 700, "model_kwargs": {"ignore_eos": True}}
"""An answer that is still being written when a test leaves it."""
SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.name %}[{{ m.name }}] {% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} {{ c.function.arguments | tojson }}</call>"
    "{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_chat_model(folder: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", chat_template=TEMPLATE
    )
    fast.save_pretrained(folder)

    config = transformers.LlamaConfig(
        vocab_size=len(vocab), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    printable = {vocab[c] for c in string.ascii_letters + string.digits + string.punctuation}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(7)
        model = transformers.LlamaForCausalLM(config).float()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) * 1.5 / parameter.shape[-1] ** 0.5)
        for row in set(range(len(vocab))) - printable:
            model.lm_head.weight[row] = 0.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """On a busy machine torch's threads wait for each other longer than these small models compute."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> None:
    """httpx gives up after 5 s, within which a busy machine that compiles kernels answers nothing."""
    default = inspect.signature(httpx.get).parameters["timeout"].default  # one object, of all its functions and clients
    default.connect = default.read = default.write = default.pool = PATIENCE


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_chat_model(tmp_path_factory.mktemp("tiny-chat")))


@pytest.fixture(scope="session")
def handle(model_path: str) -> Iterator[EngineHandle]:
    """Keeps the shared engine loaded for the whole folder."""
    held = shared_engine(model_path, **CONFIG)
    engine = held.get()
    yield held
    engine.close()  # waits for its end: a thread that is still closing when the interpreter exits kills it
    held.close()


@pytest.fixture(scope="session")
def demo() -> Iterator[EngineHandle]:
    """Keeps the bundled model loaded: it calls tools and answers in JSON."""
    held = shared_engine("demo")
    held.get()
    yield held
    if held.loaded:
        held.get().close()
    held.close()


@pytest.fixture(scope="session")
def adapter_folders(model_path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two adapters of the tiny model with answers of their own, by name, in one folder."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("first", "second")):
        base = transformers.AutoModelForCausalLM.from_pretrained(model_path)
        make_peft(base, seed, r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"]).save_pretrained(root / name)
    return {name: str(root / name) for name in ("first", "second")}


@pytest.fixture(scope="session")
def loaded_adapters(handle: EngineHandle, adapter_folders: dict[str, str]) -> tuple[str, ...]:
    """Their names, once the shared engine has loaded them."""
    for name, folder in adapter_folders.items():
        handle.get().load_adapter(name, folder)
    return tuple(adapter_folders)


@pytest.fixture
def answers(handle: EngineHandle, loaded_adapters: tuple[str, ...]) -> dict[str | None, str]:
    """The engine's own answers to "Hello" in `TOKENS` tokens, by adapter."""
    params, chat = SamplingParams(temperature=0, max_tokens=TOKENS), [{"role": "user", "content": "Hello"}]
    found = {name: handle.get().chat(chat, params, adapter=name).text for name in (None, *loaded_adapters)}
    assert len({*found.values()}) == 3, "the adapters answer differently"
    return found


@pytest.fixture
def make_chat(model_path: str, handle: EngineHandle) -> Callable[..., ChatAsyncEngine]:
    def make(**fields: Any) -> ChatAsyncEngine:
        return ChatAsyncEngine(**{"model": model_path, "engine_config": CONFIG, "temperature": 0.0, **fields})

    return make


@pytest.fixture
def make_llm(model_path: str, handle: EngineHandle) -> Callable[..., AsyncEngineLLM]:
    def make(**fields: Any) -> AsyncEngineLLM:
        return AsyncEngineLLM(**{"model": model_path, "engine_config": CONFIG, "temperature": 0.0, **fields})

    return make


@pytest.fixture
def chat(make_chat: Callable[..., ChatAsyncEngine]) -> ChatAsyncEngine:
    return make_chat(max_tokens=12)


def added(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    """LangChain's sum of a stream."""
    return sum(chunks[1:], chunks[0])  # type: ignore[return-value]


class Watch:
    """A record of what the engine did meanwhile, and a check that nothing is left behind."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        self.before = self.engine.stats()
        self.held = threading.Event()
        """Set while the engine runs freely."""
        self.held.set()
        self._remove: Callable[[], None] = lambda: None

    def ended(self, reason: str) -> int:
        """Samples that ended so since this watch began."""
        return self.engine.stats().finished.get(reason, 0) - self.before.finished.get(reason, 0)

    def hold(self, steps: int = 16, until: Callable[[], bool] | None = None) -> None:
        """Holds the engine after every so many `steps` until something lies in its inbox, or `until` says so: what a
        test is about to leave can't end before it, however late the test's own thread is. See `release`."""
        held, count = threading.Event(), 0
        go_on = until or (lambda: bool(posted(self.engine)))
        gives_up = time.monotonic() + 120

        def hook(event: object) -> None:
            nonlocal count
            if not isinstance(event, StepDone):
                return
            count += 1
            if count >= steps:
                count = 0
                while not go_on() and not held.wait(0.001):
                    assert time.monotonic() < gives_up, "nobody came to the engine that is held"

        remove = self.engine.on_event(hook)
        self.release()  # only now: it never runs freely in between
        self.held, self._remove = held, remove

    @property
    def num_requests(self) -> int:
        """Requests that have come to the engine and not ended, whether it has seen them or not. It must be held."""
        return len(self.engine.core.loop.scheduler.requests) + len(posted(self.engine))

    def release(self) -> None:
        """Let the engine run freely again. Idempotent."""
        self.held.set()
        self._remove()

    async def until_running(self, count: int = 1) -> None:
        """Return in the first step with that many requests, which are then held; give up, loudly, rather than hang."""
        loop, reached = asyncio.get_running_loop(), asyncio.Event()

        def hook(event: object) -> None:
            if getattr(event, "rows", 0) >= count:
                loop.call_soon_threadsafe(reached.set)

        remove = self.engine.on_event(hook)
        if self.held.is_set():
            self.hold(steps=1)
        try:
            await asyncio.wait_for(reached.wait(), 120)
        finally:
            remove()

    async def assert_all_given_back(self) -> None:
        """Dropped generators are closed some loop ticks later, so one request lets this loop turn; aborts are applied
        in order, so once a second one has ended all earlier aborts have been."""
        self.release()
        for _ in range(2):
            await self.engine.generate("settle", SamplingParams(max_tokens=4))
        stats = self.engine.stats()
        assert not any(stats.requests.values()), stats.requests
        assert (stats.pages.held, stats.pages.shared, stats.pages.retiring) == (0, 0, 0)
        assert stats.pages.free + stats.pages.cached == stats.pages.total

    async def assert_aborted(self, count: int = 1) -> None:
        """Waits for `count` aborts. An engine that is held stays so until they have come: a generator that was dropped
        is closed some loop ticks later, in which an engine that runs freely may write hundreds of tokens."""
        try:
            await until(lambda: self.ended("abort") >= count, f"the end of {count} by an abort")
        finally:
            self.release()
        await self.assert_all_given_back()
        assert self.ended("abort") == count, self.engine.stats().finished


@pytest.fixture
def watch(handle: EngineHandle) -> Iterator[Watch]:
    watch = Watch(handle.get().aengine)
    yield watch
    watch.release()
