"""Adapters, grammars, tools, penalties, scores, samples and predictions beside pictures, over two kinds of models: one
whose positions have three axes and whose pictures reach deep layers, one whose pictures are attended to both ways."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from support.peft_checkpoints import make_peft
from support.picture_models import IMAGE, chat, expected_logits, picture, save_picture_model, words
from support.picture_runs import Loaded, Run

from asyncengine import Engine, SamplingParams

WIDE, TALL = picture(1, (40, 24)), picture(2, (16, 48))
MESSAGES = chat("look at", WIDE, words(1, 5), TALL, "which?")
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=True)


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    whole = save_picture_model(request.param, folder)
    settings: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": "16MiB", "show_progress": False}
    with Engine.from_pretrained(folder, num_threads=1, tool_format="hermes", **settings) as engine:
        assert engine.info.no_images is None
        yield SimpleNamespace(folder=folder, whole=whole, engine=engine, plain=engine.chat(MESSAGES, GREEDY))


def logits_of(model: Any, whole: Any, answer: list[int]) -> torch.Tensor:
    """transformers' logits [tokens of the answer, vocabulary] for `MESSAGES`."""
    ids = model.engine.tokenize(MESSAGES)
    return expected_logits(whole, model.folder, [*ids, *answer[:-1]], [WIDE, TALL])[len(ids) - 1 :]


def scores(answer: Any) -> torch.Tensor:
    return torch.tensor([each.logprob for each in answer.logprobs])


def test_adapters(model: Any) -> None:
    """An adapter of the language model acts on a picture's tokens too, in one batch with others that have none."""
    wrapped = make_peft(
        copy.deepcopy(model.whole), r=4, target_modules=r".*language_model.*\.(q_proj|v_proj|o_proj|down_proj)"
    )
    state, config = peft.get_peft_model_state_dict(wrapped), wrapped.peft_config["default"]
    model.engine.load_adapter("own", tensors=state, config=config)
    streams = [model.engine.stream_chat(MESSAGES, GREEDY, adapter=name) for name in ("own", None, "own")]
    own, plain, again = [stream.result() for stream in streams]
    assert own.token_ids == again.token_ids != plain.token_ids == model.plain.token_ids
    for answer, whole in ((own, wrapped), (plain, model.whole)):
        logits = logits_of(model, whole, answer.token_ids)
        assert answer.token_ids == logits.argmax(-1).tolist()
        assert float((scores(answer) - logits.log_softmax(-1).amax(-1)).abs().max()) < 3e-4


def test_penalties(model: Any) -> None:
    """They know the prompt's text and the answer, and no placeholder."""
    params = GREEDY.replace(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.25)
    answer = model.engine.chat(MESSAGES, params)
    logits = logits_of(model, model.whole, answer.token_ids)
    assert float((scores(answer) - logits.log_softmax(-1)[range(12), answer.token_ids]).abs().max()) < 3e-4
    prompt = [token for token in model.engine.tokenize(MESSAGES) if token != IMAGE]
    for place, token in enumerate(answer.token_ids):
        given, row = answer.token_ids[:place], logits[place].clone()
        seen = torch.tensor(sorted({*prompt, *given}))
        row[seen] = torch.where(row[seen] > 0, row[seen] / 1.3, row[seen] * 1.3)
        for each in given:
            row[each] -= 0.25
        for each in set(given):
            row[each] -= 0.5
        assert int(row.argmax()) == token, place


def test_predictions(model: Any) -> None:
    before = model.engine.stats().speculation
    answer = model.engine.chat(MESSAGES, GREEDY, prediction=list(model.plain.token_ids))
    assert answer.token_ids == model.plain.token_ids
    assert scores(answer).tolist() == scores(model.plain).tolist()
    if model.whole.config.model_type == "qwen3_vl":  # a tiny model with windows is not guessed for
        assert model.engine.stats().speculation.accepted > before.accepted


@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_bfloat16(family: str, tmp_path: Path) -> None:
    """Logprobs are near transformers' own, and in chunks and batches the same to the bit."""
    whole = save_picture_model(family, tmp_path).to(torch.bfloat16)
    loaded = Loaded(tmp_path, dtype="bfloat16")
    run = Run(loaded, prefix_caching=False)
    spec = loaded.spec(MESSAGES, 12)
    (alone,) = run.serve([spec])
    ids = [IMAGE if token < 0 else token for token in spec.prompt]
    logits = expected_logits(whole, tmp_path, [*ids, *alone[:-1]], [WIDE, TALL])[len(ids) - 1 :]
    expected = logits.log_softmax(-1)[range(12), alone]
    found = run.logprobs[spec.ticket]
    assert float((torch.tensor(found) - expected).abs().mean()) < 0.1
    longest = max(span.length for span in spec.images)
    for chunk in (longest, longest + 3, 20):
        chunked = Run(loaded, prefix_caching=False, max_num_batched_tokens=chunk)
        specs = [loaded.spec(MESSAGES, 12) for _ in range(3)]
        assert chunked.serve(specs) == [alone] * 3
        assert all(chunked.logprobs[each.ticket] == found for each in specs)
    loaded.runner.close()
