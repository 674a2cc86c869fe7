"""Steps with prompts as graphs in pieces, on stand-ins: the same tokens, whatever the lengths and the padding."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from support.drive import Driver, prompts
from support.lora_driver import AdapterDriver
from support.lora_reference import random_weights
from support.tiny_models import VOCAB
from support.wide_models import make_wide

from asyncengine import SamplingParams
from asyncengine.execution.attention.base import MergedHeads
from asyncengine.execution.layers.rotary import Angles, rotate
from asyncengine.execution.runner.model_runner import ModelRunner
from asyncengine.execution.runner.prompt_graphs import may_be_cut, prompt_graph_sizes
from asyncengine.lora.layers.slots import LoraLayers
from asyncengine.step import Batch

from .graphs import Recall, on_fakes


class _Thread:
    """The work of all pieces of one size; whoever replays a piece lets it run on to that one's end."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.cuts = 0
        self.running: threading.Thread | None = None
        self._go: SimpleQueue[None] = SimpleQueue()
        self._stopped: SimpleQueue[BaseException | None] = SimpleQueue()

    def replay(self, piece: int, last: bool) -> None:
        if piece == 0:
            assert self.running is None, "the last piece of the step before was not replayed"
            self.running = threading.Thread(target=self._run, daemon=True)
            self.running.start()
        assert self.running is not None
        self._go.put(None)
        error = self._stopped.get()
        if last:
            self.running.join()
            self.running = None
        if error is not None:
            raise error

    def _run(self) -> None:
        self._go.get()
        try:
            with torch.inference_mode():
                self.work()
            self._stopped.put(None)
        except BaseException as error:
            self._stopped.put(error)

    def cut(self) -> None:
        """Stop where a piece ends, until the next one may begin."""
        self._stopped.put(None)
        self._go.get()


class _Piece:
    def __init__(self, owner: ThreadedPieces, thread: _Thread, number: int) -> None:
        self.owner, self.thread, self.number = owner, thread, number

    def replay(self) -> None:
        self.owner.replays += 1
        self.thread.replay(self.number, self.number == self.thread.cuts)


class _Capture:
    """A `PieceCapture`."""

    def __init__(self, owner: ThreadedPieces, thread: _Thread) -> None:
        self.owner, self.thread = owner, thread
        self.pieces: list[_Piece] = []

    def cut(self) -> None:
        if threading.current_thread() is self.thread.running:
            self.thread.cut()
        else:
            self.end()

    def end(self) -> None:
        self.thread.cuts = len(self.pieces)
        self.pieces.append(_Piece(self.owner, self.thread, self.thread.cuts))


class ThreadedPieces:
    """`prompt_graphs.Pieces`."""

    def __init__(self) -> None:
        self.captured = 0
        self.replays = 0

    @contextmanager
    def __call__(self, work: Callable[[], None]) -> Iterator[_Capture]:
        work()
        capture = _Capture(self, _Thread(work))
        yield capture
        capture.end()
        self.captured += len(capture.pieces)


LAYERS = 3
ENDS = ("k_proj", "down_proj", "lm_head")


def merged(backend: Any) -> Any:
    """`attend_merged` of a model without norms of heads, in torch."""

    def attend_merged(
        layer: int, qkv: torch.Tensor, heads: MergedHeads, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        size = [heads.num_heads * heads.key_dim, heads.num_kv_heads * heads.key_dim, heads.num_kv_heads * heads.key_dim]
        query, key, value = (part.unflatten(1, (-1, heads.key_dim)) for part in qkv.split(size, dim=1))
        angles = Angles(cos, sin, "halves")
        page, place = backend.kv_slots // backend.page_size, backend.kv_slots % backend.page_size
        backend.pools[layer][page, 0, place] = rotate(key, angles)
        backend.pools[layer][page, 1, place] = value
        return backend.attend(layer, rotate(query, angles)).flatten(1)

    return attend_merged


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide("qwen2", tmp_path_factory.mktemp("graphs") / "qwen2")


def make_runner(
    path: Path, sizes: list[int] | None, lora: Callable[[Any], LoraLayers | None] = lambda module: None
) -> tuple[ModelRunner, ThreadedPieces]:
    def attention(backend: Any) -> None:
        backend.attend_merged = merged(backend)

    runner, pieces = on_fakes(path, lora, attention=attention), ThreadedPieces()
    if sizes is not None:
        assert may_be_cut(runner.model, runner.backend)
        runner.use_graphs([1, 2], Recall())
        runner.use_prompt_graphs(sizes, pieces)
    return runner, pieces


def test_sizes() -> None:
    assert prompt_graph_sizes(20) == [20]
    assert prompt_graph_sizes(300) == [32, 64, 128, 256, 300]
    assert prompt_graph_sizes(100_000)[-3:] == [1536, 1792, 2048]


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.9)])
def test_outputs_are_those_without_graphs(params: SamplingParams, folder: Path) -> None:
    outputs = []
    for sizes in (None, [4, 16, 48]):
        runner, pieces = make_runner(folder, sizes)
        assert pieces.captured == (0 if sizes is None else 3 * (LAYERS + 1))
        driver = Driver(runner)
        for chunk, preempt_every in ((None, None), (5, 4)):
            jobs = [
                driver.job(prompt, 9 - place, params, place)
                for place, prompt in enumerate(prompts([3, 9, 22, 1, 6], VOCAB))
            ]
            outputs.append(driver.run(jobs, chunk, preempt_every))
        assert bool(pieces.replays) == (sizes is not None)
        runner.close()
    assert outputs[:2] == outputs[2:]
    assert len({token for output in outputs[0] for token in output}) > 8


def test_a_token_in_flight_is_gathered_by_the_graph(folder: Path) -> None:
    """A decode row, whose token nobody on the host knows yet, beside a prompt."""
    answers = []
    for sizes in (None, [16]):
        runner, _ = make_runner(folder, sizes)
        driver = Driver(runner)
        first, second = (driver.job(prompt, 4) for prompt in prompts([6, 5], VOCAB, seed=4))
        driver.admit(first)
        driver.advance([first])
        token = first.tokens.pop()  # the device has it
        driver.admit(second)
        row = driver.row(second)
        flying = driver.row(first)._replace(num_scheduled=1, in_flight=True, samples=True, tokens=first.tokens)
        need = -(-(flying.start + 1) // runner.page_size)
        while len(first.pages) < need:
            first.pages.append(driver.free.pop())
        result = runner.launch(Batch(9, (row, flying))).wait()
        answers.append((token, result.tokens))
        runner.close()
    assert answers[0] == answers[1]


@pytest.mark.parametrize("early", [False, True])
def test_adapters(early: bool, folder: Path) -> None:
    """Rows with different ones and with none, the output layer changed as well; a larger one moves their memory."""
    outputs = []
    for sizes in (None, [4, 16, 48]):
        kept: list[LoraLayers] = []

        def install(module: Any, kept: list[LoraLayers] = kept) -> LoraLayers:
            kept.append(LoraLayers(module, 3, 32, masked=True))
            if early:
                kept[0].allocate([path for path in kept[0].modules if path.endswith(ENDS)], 8)
            return kept[0]

        runner, pieces = make_runner(folder, sizes, install)
        (lora,) = kept
        assert pieces.captured == (0 if sizes is None else 3 * (LAYERS + 1) * (1 + early))
        driver = AdapterDriver(runner, lora)
        for rank, slots in ((8, [1, 0, 2, 1, 0]), (8, [0] * 5), (20, [2, 1, 0, 0, 2])):
            for slot in (1, 2):
                lora.write(slot, random_weights(lora, rank, ENDS, seed=slot))
            inputs = prompts([3, 9, 22, 1, 6], VOCAB)
            before, captured = pieces.replays, pieces.captured
            jobs = [driver.with_adapter(*each, 6) for each in zip(inputs, slots, strict=True)]
            outputs.append(driver.run(jobs, 5))
            assert (pieces.replays > before) == (sizes is not None)
            assert (pieces.captured > captured) == (sizes is not None and any(slots) and not (early and rank == 8))
        runner.close()
    assert outputs[:3] == outputs[3:]
    assert outputs[0] != outputs[1] != outputs[2]
