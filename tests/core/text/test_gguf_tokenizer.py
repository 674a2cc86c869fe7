"""Tokenizers built from GGUF metadata: the same ids and texts as the Hugging Face tokenizer of the same model."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from core.text.gguf_zoo import PUBLISHED, SENTENCEPIECE, bert, by_class, published
from core.text.many_scripts import TEXTS, random_texts
from support.gguf_metadata import byte_level_metadata, sentencepiece_metadata, wordpiece_metadata
from support.long import TIMES
from support.tables import table
from transformers import AutoTokenizer

from asyncengine.assembly.gguf_text import load_gguf_tokenizer
from asyncengine.demo import MODEL_PATH
from asyncengine.errors import InvalidParameter, ModelNotFound, UnsupportedModel
from asyncengine.grammar.chat import ChatPlanner
from asyncengine.grammar.chat.harmony import MARKS
from asyncengine.text.tokenizer import TextTokenizer

FUZZ = 150 * TIMES
"""Random texts per tokenizer; 20,000 make the long form (a few minutes)."""


def assert_same(built: TextTokenizer, hf: Any, texts: Any, seed: int = 0) -> None:
    """Ids with and without what goes around a prompt, and the texts of those ids with and without special tokens."""
    for text in chain(texts, random_texts(seed, FUZZ)):
        ids = hf.encode(text, add_special_tokens=False)
        assert built.encode(text, add_special_tokens=False) == ids, ascii(text)
        assert built.encode(text) == hf.encode(text), ascii(text)
        for skip in (False, True):
            want = hf.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert built.decode(ids, skip_special_tokens=skip) == want, ascii(text)


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_families_equal_their_published_tokenizers(pre: str) -> None:
    hf = published(pre)
    assert_same(load_gguf_tokenizer(byte_level_metadata(hf, pre, pad_to=640)), hf, TEXTS, seed=len(pre))


@pytest.mark.parametrize("pre", ["qwen2", "gpt-2"])
def test_byte_level_families_equal_the_classes_of_transformers(pre: str) -> None:
    hf = by_class(pre)
    assert_same(load_gguf_tokenizer(byte_level_metadata(hf, pre)), hf, TEXTS)


@pytest.mark.parametrize("architecture", SENTENCEPIECE)
def test_sentencepiece_families_equal_theirs(architecture: str) -> None:
    """Merges come from the scores alone, which the converter has overwritten for added tokens."""
    hf, scores = SENTENCEPIECE[architecture]()
    metadata = sentencepiece_metadata(hf, scores, architecture=architecture, pad_to=len(scores) + 40)
    assert_same(load_gguf_tokenizer(metadata), hf, TEXTS)


def test_transformers_is_imported_for_nothing_but_its_own_tokenizer(tmp_path: Path) -> None:
    """Its import takes longer than the rest of a small file's load."""
    metadata = {
        **byte_level_metadata(published("qwen2"), "qwen2"),
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }
    (tmp_path / "metadata").write_bytes(pickle.dumps(metadata))
    program = f"""
import pickle, sys
from asyncengine.assembly.gguf_text import load_gguf_tokenizer
built = load_gguf_tokenizer(pickle.load(open({str(tmp_path / "metadata")!r}, "rb")))
text = built.render_chat([{{"role": "user", "content": "Hi there"}}])
sent = pickle.loads(pickle.dumps(built))
ids, before = sent.encode(text), "transformers" in sys.modules
same = built.hf.encode(text) == sent.hf.encode(text) == ids
print(before, built.decode(ids), same, built.hf.eos_token == sent.hf.eos_token)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "Hi", "there", "True", "True"]


def test_gemma_4_brings_its_merges() -> None:
    hf, scores = SENTENCEPIECE["gemma3"]()
    metadata = sentencepiece_metadata(hf, scores, architecture="gemma4")
    merges = json.loads(hf.backend_tokenizer.to_str())["model"]["merges"]
    metadata |= {"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": [" ".join(merge) for merge in merges]}
    metadata["tokenizer.ggml.scores"] = [-1000.0] * len(metadata["tokenizer.ggml.tokens"])
    assert_same(load_gguf_tokenizer(metadata), hf, TEXTS)
    # converters set the flag for every Gemma 4; the instruct models' templates write the token themselves
    chatty = load_gguf_tokenizer({**metadata, "tokenizer.chat_template": "{{ bos_token }}"})
    assert chatty.encode("x") == chatty.encode("x", add_special_tokens=False)


def test_the_demo_model_by_its_own_tokenizer_json() -> None:
    """Its way of cutting has no name in the format; the format has room for the whole tokenizer.json."""
    hf = AutoTokenizer.from_pretrained(MODEL_PATH)
    source = (Path(MODEL_PATH) / "tokenizer.json").read_text(encoding="utf-8")
    metadata = byte_level_metadata(hf, "asyncengine-demo") | {"tokenizer.huggingface.json": source}
    built = load_gguf_tokenizer(metadata)
    assert_same(built, hf, TEXTS)
    chat = [{"role": "user", "content": "Grüße, 世界"}]
    assert built.render_chat(chat) == TextTokenizer(hf).render_chat(chat)
    assert built.table.mode == TextTokenizer(hf).table.mode == "bytes"
    del metadata["tokenizer.huggingface.json"]
    with pytest.raises(UnsupportedModel, match=r"'asyncengine-demo'.*Known: llama3"):
        load_gguf_tokenizer(metadata)


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_equals_berts(lowercase: bool) -> None:
    hf = bert(lowercase)
    metadata = wordpiece_metadata(hf)
    if not lowercase:
        metadata["tokenizer.ggml.normalizer.lowercase"] = False
    assert_same(load_gguf_tokenizer(metadata), hf, TEXTS)
    del metadata["tokenizer.ggml.seperator_token_id"]
    with pytest.raises(ModelNotFound, match="the token called sep is not named"):
        load_gguf_tokenizer(metadata)


def test_ends_of_turns_are_collected() -> None:
    metadata = byte_level_metadata(published("qwen2"), "qwen2")
    tokens = metadata["tokenizer.ggml.tokens"]
    end, text_end = tokens.index("<|im_end|>"), tokens.index("<|endoftext|>")
    assert load_gguf_tokenizer(metadata).end_token_ids == (end, text_end)
    metadata["tokenizer.ggml.eot_token_id"] = tokens.index("<|begin|>")
    assert load_gguf_tokenizer(metadata).end_token_ids == (end, tokens.index("<|begin|>"), text_end)
    del metadata["tokenizer.ggml.eos_token_id"], metadata["tokenizer.ggml.eot_token_id"]
    assert load_gguf_tokenizer(metadata).end_token_ids == (end, text_end)
    metadata["tokenizer.ggml.token_type"][end] = 4  # a word, not a mark
    assert load_gguf_tokenizer(metadata).end_token_ids == (text_end,)


def test_a_message_inside_a_turn_does_not_end_it() -> None:
    metadata = byte_level_metadata(published("gpt-4o"), "gpt-4o")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    tokens += ["<|end|>", "<|return|>"]
    types += [3, 3]
    assert len(tokens) - 2 in load_gguf_tokenizer(metadata).end_token_ids
    tokens += ["<|call|>"]
    types += [3]
    ends = load_gguf_tokenizer(metadata).end_token_ids
    assert {tokens.index("<|return|>"), tokens.index("<|call|>")} < set(ends)
    assert tokens.index("<|end|>") not in ends


@pytest.mark.parametrize(("architecture", "pre"), [("gptoss", "gpt-4o"), ("lfm2", "llama-bpe"), ("mistral3", "tekken")])
def test_ollamas_converter_does_not_know_how_text_is_cut(architecture: str, pre: str) -> None:
    """Its word for that is "default", which cuts otherwise."""
    hf = published(pre)
    metadata = byte_level_metadata(hf, "default", architecture=architecture)
    assert_same(load_gguf_tokenizer(metadata), hf, TEXTS)
    del metadata["tokenizer.ggml.pre"]
    assert_same(load_gguf_tokenizer(metadata), hf, TEXTS)


def test_chat_templates_of_the_header() -> None:
    metadata = byte_level_metadata(published("command-r"), "command-r")
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(InvalidParameter, match="no chat template"):
        load_gguf_tokenizer(metadata).render_chat(chat)
    metadata["tokenizer.chat_template"] = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    built = load_gguf_tokenizer(metadata)
    assert built.render_chat(chat) == "<|begin|>hi"
    assert built.encode(built.render_chat(chat), add_special_tokens=False)[0] == built.bos_token_id
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    metadata["tokenizer.chat_template.tool_use"] = (
        "with {{ tools|length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    both = load_gguf_tokenizer(metadata)
    assert both.render_chat(chat) == "<|begin|>hi"
    assert both.render_chat(chat, [tool]) == "with 1hi"


def test_channels_where_the_header_has_no_template() -> None:
    """Ollama's gpt-oss: what OpenAI's description of the format shows, recognised as such."""
    metadata = byte_level_metadata(published("gpt-4o"), "default", architecture="gptoss")
    metadata["tokenizer.ggml.tokens"] += MARKS
    metadata["tokenizer.ggml.token_type"] += [3] * len(MARKS)
    built = load_gguf_tokenizer(metadata)
    planner = ChatPlanner(built)
    assert planner.tool_format is not None
    assert planner.tool_format.family == "harmony"
    assert planner.reasoning is not None
    case = table(__file__, "a chat in channels")
    text = built.render_chat(case["chat"], case["tools"], reasoning_effort="high")
    system, _, rest = text.partition("<|start|>developer<|message|>")
    assert system.startswith("<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n")
    assert system.endswith(case["system's end"])
    assert rest == case["rest"]
    plain = built.render_chat([{"role": "user", "content": "Hi"}])
    assert plain.endswith("for every message.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant")
    metadata["tokenizer.chat_template"] = "mine"
    assert load_gguf_tokenizer(metadata).render_chat(case["chat"]) == "mine"


def test_padding_of_the_vocabulary_is_not_part_of_it() -> None:
    hf = published("llama-bpe")
    built = load_gguf_tokenizer(byte_level_metadata(hf, "llama-bpe", pad_to=700))
    assert built.vocab_size == len(hf)
    assert built.decode([len(hf), 699]) == ""
    assert built.encode("[PAD699]", add_special_tokens=False) == hf.encode("[PAD699]", add_special_tokens=False)


@pytest.mark.parametrize(("kind", "asked", "edges"), [("gpt2", None, "b"), ("gpt2", False, ""), ("gpt2", True, "be")])
def test_what_goes_around_a_prompt(kind: str, asked: bool | None, edges: str) -> None:
    metadata = byte_level_metadata(published("llama-bpe"), "llama-bpe")
    del metadata["tokenizer.ggml.add_bos_token"], metadata["tokenizer.ggml.add_eos_token"]
    if asked is not None:
        metadata |= {"tokenizer.ggml.add_bos_token": asked, "tokenizer.ggml.add_eos_token": asked}
    built = load_gguf_tokenizer(metadata)
    middle = built.encode("hello", add_special_tokens=False)
    want = [*([built.bos_token_id] * ("b" in edges)), *middle, *([built.eos_token_id] * ("e" in edges))]
    assert built.encode("hello") == want


def test_old_files_of_llama_name_no_tokens() -> None:
    hf, scores = SENTENCEPIECE["llama"]()
    metadata = sentencepiece_metadata(hf, scores)
    for name in ("bos_token_id", "eos_token_id", "unknown_token_id", "add_bos_token", "add_eos_token"):
        del metadata[f"tokenizer.ggml.{name}"]
    built = load_gguf_tokenizer(metadata)
    assert built.encode("fox") == hf.encode("fox")
    assert built.end_token_ids[0] == hf.eos_token_id


def test_texts_stream_token_by_token() -> None:
    """The engine's own tables find their fast forms in these tokenizers, and encode without transformers' lock."""
    hf, scores = SENTENCEPIECE["gemma3"]()
    pieces = load_gguf_tokenizer(sentencepiece_metadata(hf, scores, architecture="gemma3"))
    words = load_gguf_tokenizer(byte_level_metadata(published("qwen2"), "qwen2", pad_to=640))
    assert (pieces.table.mode, words.table.mode) == ("pieces", "bytes")
    for built in (pieces, words):
        assert built.backend is not None
        for text in TEXTS:
            ids = built.encode(text, add_special_tokens=False)
            stream = built.table.stream(skip_special_tokens=False)
            assert "".join([stream.push([token]) for token in ids]) + stream.finish() == built.decode(ids, False)


def test_no_space_goes_before_a_text_where_the_header_says_so() -> None:
    hf, scores = SENTENCEPIECE["llama"]()
    metadata = sentencepiece_metadata(hf, scores) | {"tokenizer.ggml.add_space_prefix": False}
    built = load_gguf_tokenizer(metadata)
    ids = built.encode("quick fox", add_special_tokens=False)
    assert built.hf.convert_ids_to_tokens(ids)[0][0] != "▁"
    assert built.decode(built.encode(" quick", add_special_tokens=False)) == " quick"
