"""Pictures in decisions: prompts and numbers of transformers, every form, and the same to the bit in company."""

from __future__ import annotations

import asyncio
import base64
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from langchain_core.decisions import Choice
from langchain_core.messages import HumanMessage
from support.picture_models import IMAGE, expected_logits, picture, png, save_picture_model
from transformers.decision.template_utils import DECISION_PROMPT, _split_at_placeholders
from transformers.utils.chat_template_utils import _compile_jinja_template

from asyncengine import DEMO_MODEL, AsyncEngine, InvalidParameter
from asyncengine.engine.decisions import Pictures
from asyncengine.integrations.langchain.decisions import AsyncEngineDecisions

QUESTIONS: dict[str, Any] = {
    "same": {"type": "noul", "instructions": "Is img-2 like the first?"},
    "tone": {"type": "choice", "instructions": "Which colour?", "criteria": {"red": "as img-1", "blue": None}},
    "much": {"type": "score", "criteria": ["none", "some", "all"]},
}
STATE = "Look at <img-1> and {at}."
SIZES = {"img-1": (24, 40), "img-2": (40, 24)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    save_picture_model("qwen2_5_vl", folder)
    return folder


@pytest.fixture
def assets() -> dict[str, Any]:
    return {name: picture(seed, size) for seed, (name, size) in enumerate(SIZES.items())}


async def test_prompts_and_numbers_are_those_of_transformers(folder: Path, assets: dict[str, Any]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    async with await AsyncEngine.from_pretrained(folder, dtype="float32", kv_cache_memory="8MB") as engine:
        made = await engine.decide({"seen": STATE}, QUESTIONS, assets=assets)
        prompts = engine.core.decision_prompts()
        for question in prompts.questions(QUESTIONS):
            pictures = Pictures(assets)
            ids, _ = prompts.prompt(prompts.parted({"seen": STATE}, pictures), question, pictures)
            text = _compile_jinja_template(DECISION_PROMPT).render(state={"seen": STATE}, question=question)
            parts = _split_at_placeholders(text, assets, assets.__getitem__)
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
            )
            assert re.sub(r"(<\|image\|>)+", "<|image|>", tokenizer.decode(ids)) == chat
            shown = [part["image"] for part in parts if part["type"] == "image"]
            logits = expected_logits(model, folder, ids, shown)[-1]
            labels = [tokenizer(label, add_special_tokens=False)["input_ids"][0] for label in question.labels]
            wanted = torch.softmax(logits[labels], -1).tolist()
            assert IMAGE in ids
            assert list(made[question.name].probabilities.values()) == pytest.approx(wanted, abs=1e-4)


async def test_every_form_of_a_picture_and_any_company(folder: Path, assets: dict[str, Any]) -> None:
    first, second = ({"type": "image", "image": each} for each in assets.values())
    url = "data:image/png;base64," + base64.b64encode(png(assets["img-1"])).decode()
    async with await AsyncEngine.from_pretrained(folder, dtype="float32", kv_cache_memory="8MB") as engine:
        one = {"colour": QUESTIONS["tone"]}
        wanted = await engine.decide(["a", "img-1"], one, assets={"img-1": assets["img-1"]})
        forms = [
            first,
            {"type": "image_url", "image_url": {"url": url}},
            {"type": "image", "image": png(assets["img-1"])},
        ]
        one = {"colour": {**QUESTIONS["tone"], "criteria": {"red": ["as ", first], "blue": None}}}
        alone = [await engine.decide(["a", form], one) for form in forms]
        assert alone[0].answers == alone[1].answers == alone[2].answers
        assert alone[0].answers != (await engine.decide(["a", second], one)).answers
        beside = await asyncio.gather(*(engine.decide(["a", form], one) for form in (*forms, second)))
        assert [each.answers for each in beside[:3]] == [each.answers for each in alone]
        again = await engine.decide(["a", "img-1"], {"colour": QUESTIONS["tone"]}, assets={"img-1": url})
        assert again.answers == wanted.answers
        assert again.usage.cached_tokens > 0
    chain = AsyncEngineDecisions(model=str(folder), dtype="float32", kv_cache_memory="8MB")
    block = {"type": "image", "base64": url.partition(",")[2], "mime_type": "image/png"}
    asked = {"colour": Choice(instructions="Which colour?", criteria={"red": ["as ", forms[1]], "blue": None})}
    said = await chain.ainvoke({"state": ["a", block], "questions": asked})
    assert said.answers["colour"].probabilities == alone[0]["colour"].probabilities
    heard = {"type": "audio", "base64": "AAAA", "mime_type": "audio/wav"}
    with pytest.raises(ValueError, match="of type 'audio'"):
        await chain.ainvoke({"state": HumanMessage([heard]), "questions": asked})


@pytest.mark.parametrize(
    ("state", "assets", "says"),
    [
        ({"x": {"type": "image", "image": b"GIF"}}, None, "state: is no picture in one of the formats"),
        ("img", {"img": "http://nowhere/x.png"}, "assets['img']: must be a data URL"),
        ("a", {"": "x"}, "assets: must map names to pictures"),
        (b"bytes", None, "state: must be text or JSON data"),
    ],
)
async def test_bad_pictures_are_named(state: Any, assets: Any, says: str, folder: Path) -> None:
    async with await AsyncEngine.from_pretrained(folder, dtype="float32", kv_cache_memory="8MB") as engine:
        with pytest.raises(InvalidParameter) as error:
            await engine.decide(state, {"q": QUESTIONS["much"]}, assets=assets)
        assert says in str(error.value)


async def test_data_with_a_type_is_no_picture() -> None:
    async with await AsyncEngine.from_pretrained(DEMO_MODEL, kv_cache_memory="8MB") as engine:
        made = await engine.decide({"type": "image", "src": "logo.png"}, {"q": QUESTIONS["much"]})
        assert made.answers != (await engine.decide({"type": "image"}, {"q": QUESTIONS["much"]})).answers


async def test_a_model_of_text_refuses_a_picture(assets: dict[str, Any]) -> None:
    async with await AsyncEngine.from_pretrained(DEMO_MODEL, kv_cache_memory="8MB") as engine:
        for state, name in (("Is img-1 red?", "assets['img-1']"), ([{"type": "image", "image": b"x"}], "state")):
            with pytest.raises(InvalidParameter, match=re.escape(f"{name}: is a picture, and this model reads none")):
                await engine.decide(state, {"q": QUESTIONS["much"]}, assets=assets)
