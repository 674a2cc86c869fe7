"""Every family that reads pictures equals transformers: log-probabilities and greedy tokens, however it is computed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from support.long import LONG
from support.picture_models import PROCESSORS, chat, expected_logits, picture, save_picture_model, words
from support.picture_runs import PAGE, Loaded, Run

from asyncengine.images import without_identity


def _pixtral(self: Any, made: Any, index: int) -> str:
    """The text as `PixtralProcessor` of transformers 5.24 has it, which is not to be had without torchvision."""
    size = self.patch_size * self.spatial_merge_size
    height, width = made["image_sizes"][index]
    tokens = [[self.image_token] * (width // size) + [self.image_break_token]] * (height // size)
    flat = [each for row in tokens for each in row]
    flat[-1] = self.image_end_token
    return "".join(flat)


def _lfm2(self: Any, made: Any, index: int) -> str:
    own = hf.Lfm2VlProcessor.__new__(hf.Lfm2VlProcessor)
    own.image_processor, own.image_token = SimpleNamespace(**self.image_processor._settings), self.image_token
    own.image_start_token, own.image_end_token = "<|image_start|>", "<|image_end|>"
    own.image_thumbnail_token = "<|img_thumbnail|>"
    size = [int(side) * own.image_processor.encoder_patch_size for side in made["spatial_shapes"][-1]]
    counted = {"image_rows": [made["rows"]], "image_cols": [made["columns"]], "image_sizes": [size]}
    return str(own.replace_image_token(counted, index, use_image_special_tokens=True))


PROCESSOR_CLASSES: dict[str, Any] = {
    "qwen2_vl": hf.Qwen2VLProcessor, "qwen2_5_vl": hf.Qwen2_5_VLProcessor, "qwen3_vl": hf.Qwen3VLProcessor,
    "qwen3_5": hf.Qwen3VLProcessor, "glm4v": hf.Glm4vProcessor, "glm46v": hf.Glm46VProcessor,
    "mistral3": SimpleNamespace(replace_image_token=_pixtral),
    "idefics3": hf.Idefics3Processor, "smolvlm": hf.SmolVLMProcessor, "gemma3": hf.Gemma3Processor,
    "gemma4": hf.Gemma4Processor, "gemma4-small": hf.Gemma4Processor, "internvl": hf.InternVLProcessor,
    "lfm2_vl": SimpleNamespace(replace_image_token=_lfm2),
}  # fmt: skip
WANT = 24
USUAL = ("qwen3_vl", "qwen3_5", "idefics3", "gemma4")
"""Families that go through the ways of computing steps in the short form as well: positions of three axes, states,
rows of pictures, and pictures that are never cut. Others differ from one of them in their tower alone."""
some_models = pytest.mark.parametrize(
    "model", [name for name in PROCESSORS if LONG or name in USUAL], indirect=True, scope="module"
)
WIDE, TALL = picture(1, (40, 24)), picture(2, (16, 48))
CHATS = {
    "between texts": (chat("look at", WIDE, words(1, 5)), [WIDE]),
    "two, one behind the other": (chat(WIDE, TALL, words(2, 3)), [WIDE, TALL]),
    "the same twice": (chat(TALL, "and", TALL, "differ?"), [TALL, TALL]),
    "in the midst of a conversation": (
        [*chat(words(3, 4), WIDE), {"role": "assistant", "content": "a cat"}, *chat("and", TALL, "this?")],
        [WIDE, TALL],
    ),
    "none": (chat(words(4, 20)), []),
}


@pytest.fixture(scope="module", params=PROCESSORS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    whole = save_picture_model(request.param, folder)
    loaded = Loaded(folder)
    yield SimpleNamespace(name=request.param, folder=folder, whole=whole, loaded=loaded, answers={})
    loaded.runner.close()


def answers(model: Any) -> list[list[int]]:
    """Answers to each of `CHATS` alone, which are compared with transformers once."""
    for name, (messages, pictures) in CHATS.items():
        if name not in model.answers:
            run = Run(model.loaded)
            spec = model.loaded.spec(messages, WANT)
            (found,) = run.serve([spec])
            ids = without_identity(spec.prompt, spec.images)
            logits = expected_logits(model.whole, model.folder, [*ids, *found[:-1]], pictures)[len(ids) - 1 :]
            assert found == logits.argmax(-1).tolist(), name
            scores = logits.log_softmax(-1).amax(-1)
            assert float((torch.tensor(run.logprobs[spec.ticket]) - scores).abs().max()) < 3e-4, name
            model.answers[name] = found
    return list(model.answers.values())


def specs(model: Any, want: int = WANT) -> list[Any]:
    return [model.loaded.spec(messages, want) for messages, _ in CHATS.values()]


def test_equals_transformers(model: Any) -> None:
    found = answers(model)
    assert len({tuple(each) for each in found}) == len(found)
    assert len({token for each in found for token in each}) > 8


@some_models
@pytest.mark.parametrize(
    ("settings", "times"),
    [({"prefix_caching": False}, 4), ({"preempt_every": 5, "max_num_batched_tokens": 16}, 1),
     ({"image_cache_memory": None, "max_num_batched_tokens": 16, "prefix_caching": False}, 1)],
    ids=["in a batch", "preempted", "encoded again"],
)  # fmt: skip
def test_however_it_is_computed(settings: dict[str, Any], times: int, model: Any) -> None:
    run = Run(model.loaded, **settings)
    assert run.serve([spec for _ in range(times) for spec in specs(model)]) == answers(model) * times
    if "preempt_every" in settings:
        assert run.scheduler.counters.preemptions > 5
    if "image_cache_memory" in settings:
        assert run.encoded > 2
        assert len(model.loaded.runner.image_store._encoded) <= 2


@some_models
def test_in_chunks_of_every_size_that_cuts_a_picture(model: Any) -> None:
    longest = max(span.length for spec in specs(model) for span in spec.images)
    whole = model.loaded.prompts._processor.block > 0
    least = longest if whole else 1
    step = 1 if LONG else max(5, longest // 3)
    for chunk in range(least, longest + 3, step):
        run = Run(model.loaded, max_num_batched_tokens=chunk, prefix_caching=False)
        begun = [each[:6] for each in answers(model)]
        assert run.serve(specs(model, 6)) == begun, f"chunk {chunk}"
        spans = [(row, span) for batch in run.batches for row in batch.rows for span in row.spec.images]
        inside = [row.start + row.num_scheduled in range(span.first + 1, span.end) for row, span in spans]
        if whole:
            assert not any(inside)
        elif chunk < longest:
            assert any(inside)


@some_models
def test_in_a_pool_that_is_too_small_for_all(model: Any) -> None:
    every = specs(model)
    pages = max(36, max(spec.max_total for spec in every) // PAGE + 6)
    run = Run(model.loaded, pages=pages, max_num_batched_tokens=16)
    assert run.serve(every) == answers(model)
    assert max(len(batch.rows) for batch in run.batches) < len(CHATS)


@some_models
def test_from_the_cache_without_encoding(model: Any) -> None:
    expected, run = answers(model), Run(model.loaded)  # in this order: both runs write to the same pages
    assert run.serve(specs(model)) == expected
    encoded = run.encoded
    assert encoded == 2  # each picture once, whoever names it
    again = specs(model)
    assert run.serve(again) == expected
    assert run.encoded == encoded
    assert all(run.cached[spec.ticket] >= spec.prompt_len - 4 for spec in again)


@some_models
def test_samples_of_one_prompt_share_its_pictures(model: Any) -> None:
    messages, _ = CHATS["between texts"]
    first = model.loaded.spec(messages, WANT)
    group = [model.loaded.spec(messages, WANT, group=first.ticket, index=1 + place) for place in range(3)]
    first = model.loaded.spec(messages, WANT)
    run = Run(model.loaded)
    assert run.serve([first, *group]) == [answers(model)[0]] * 4
    assert run.encoded == 1


def test_other_pixels_give_another_answer(model: Any) -> None:
    """Nothing above would be worth anything if pictures did not matter."""
    messages = chat("look at", picture(9, (40, 24)), words(1, 5))
    assert Run(model.loaded).serve([model.loaded.spec(messages, WANT)]) != answers(model)[:1]


def test_the_text_in_their_places_is_that_of_transformers(model: Any) -> None:
    own = model.loaded.prompts._processor
    inner = own.placeholder * 4
    holder = SimpleNamespace(
        image_processor=own._processor, image_token=own.placeholder, image_seq_len=4, patch_size=4,
        spatial_merge_size=2, image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]",
        start_image_token="<img>", end_image_token="</img>", image_seq_length=4, boi_token="<|begin|>",
        eoi_token="<|end|>", fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>",
        global_image_token="<global-img>", full_image_sequence=f"\n\n<|begin|>{inner}<|end|>\n\n",
    )  # fmt: skip
    others: list[dict[str, Any]] = [{}]
    if model.name == "gemma3":
        others = [{"num_crops": [0]}, {"num_crops": [3]}]
    elif model.name == "internvl":
        others = [{"num_patches": [1]}, {"num_patches": [4]}]
    elif model.name == "lfm2_vl":
        others = [{}, {"rows": 1, "columns": 1, "spatial_shapes": np.array([[4, 6]])}]
    elif model.name in ("idefics3", "smolvlm"):
        others = [{"rows": [[rows]], "cols": [[columns]]} for rows, columns in ((0, 0), (1, 2), (3, 4))]
    for other in others:
        made = {**own._made(WIDE), **other}
        found = own.family.placed(made, own._config, own._text_of)
        assert found == PROCESSOR_CLASSES[model.name].replace_image_token(holder, made, 0)
