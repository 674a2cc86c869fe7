"""A tokenizer read without transformers does what transformers' does, or is left to it."""

from __future__ import annotations

import inspect
import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core.text.many_scripts import TEXTS, random_texts
from core.text.tokenizer_zoo import LINES, SPECIAL, byte_fallback, byte_level, unigram
from support.data import cases_of
from support.tables import table
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import decoders as tokenizer_decoders
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from asyncengine.config import EngineConfig
from asyncengine.demo import MODEL_PATH
from asyncengine.text.chat_template import RESERVED, ChatTemplate
from asyncengine.text.plain_tokenizer import PlainTokenizer, read_plain_tokenizer
from asyncengine.text.tokenizer import TextTokenizer, load_tokenizer

Settings = dict[str, Any]
SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
ENDS: Settings = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = """{{ bos_token }}{%- set ns = namespace(n=0) %}
{% for m in messages %}
    {%- if m.role == 'tool' and loop.first %}{{ raise_exception('a tool goes first') }}{% endif %}
    {% set ns.n = ns.n + 1 %}
<|im_start|>{{ m.role }}{{ ns.n }}
{% if m.role == 'assistant' %}{% generation %}{{ m.reasoning_content or '' }}{{ m.content }}!{% endgeneration %}
{% else %}{{ m.content if m.content is string else m.content | map(attribute='text') | join('|') }}<|im_end|>
{% endif %}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{{ c | tojson(indent=2) }}{% endfor %}
{% if loop.index > 6 %}{% break %}{% endif %}
{% endfor %}
{% if tools %}{{ tools | tojson }}{% endif %}{{ dict(a=1) }}{{ strftime_now('%Y') }}{{ documents }}{{ eos_token }}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL = {"type": "function", "function": {"name": "addé", "parameters": {"type": "object", "x": "<&'>"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": "é<&>"}}}
CHATS: list[list[Settings]] = table(__file__, "plain chats")


def qwen() -> Tokenizer:
    """A tokenizer with the rules of `Qwen2Tokenizer`."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    tok.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tok.decoder = tokenizer_decoders.ByteLevel()
    tok.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tok.train_from_iterator(LINES, trainers.BpeTrainer(vocab_size=520, initial_alphabet=alphabet, show_progress=False))
    tok.add_special_tokens([*SPECIAL, "<|endoftext|>"])
    tok.add_tokens(["<tool>"])
    return tok


def beginning(tok: Tokenizer) -> Tokenizer:
    """The tokenizer, putting a token before each text."""
    place = tok.token_to_id("<s>")
    template = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", place)])
    tok.post_processor = template
    return tok


def saved(folder: Path, tok: Tokenizer, family: str, declared: str, settings: Settings) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tok.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": declared, **settings}))
    (folder / "config.json").write_text(json.dumps({"model_type": family, **SIZES}))
    return folder


def decoder_of(tok: Tokenizer) -> Settings:
    """All added tokens, as tokenizer_config.json of transformers 4 lists them."""
    added = json.loads(tok.to_str())["added_tokens"]
    return {str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added}


OLDER: Settings = {
    "add_bos_token": False, "add_prefix_space": False, "clean_up_tokenization_spaces": False, "errors": "replace",
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "model_max_length": 131072, "unk_token": None,
    "pad_token": "<|endoftext|>", "split_special_tokens": False, "bos_token": None, "eos_token": "<|im_end|>",
}  # fmt: skip
NEWER: Settings = {
    **ENDS, "backend": "tokenizers", "is_local": False, "model_max_length": 10**30, "extra_special_tokens": ["</s>"],
}  # fmt: skip
TYPED = {"__type": "AddedToken", "content": "<s>", "lstrip": False, "normalized": False, "rstrip": False}
KINDS: dict[str, tuple[str, str, Callable[[], Tokenizer], Settings]] = {
    "llama": ("llama", "PreTrainedTokenizerFast", lambda: byte_level(qwen=True), {**ENDS, "chat_template": TEMPLATE}),
    "llama 3": (
        "llama", "LlamaTokenizerFast", lambda: beginning(byte_level(qwen=False)),
        {**ENDS, "bos_token": TYPED, "add_bos_token": False, "legacy": True},
    ),
    "llama 2 as it is": (
        "llama", "TokenizersBackend", lambda: beginning(byte_fallback(strip=True)), {**NEWER, "unk_token": "<unk>"},
    ),
    "mistral": (
        "mistral", "LlamaTokenizer", lambda: beginning(byte_fallback(strip=True)),
        {**ENDS, "unk_token": "<unk>", "clean_up_tokenization_spaces": True, "add_eos_token": True},
    ),
    "qwen 2": ("qwen2", "Qwen2Tokenizer", qwen, OLDER),
    "qwen 2 declared otherwise": ("qwen2", "PreTrainedTokenizerFast", qwen, OLDER),
    "qwen 2 by its defaults": ("qwen2", "Qwen2TokenizerFast", qwen, {}),
    "qwen 3": ("qwen3", "Qwen2Tokenizer", qwen, {**OLDER, "added_tokens_decoder": decoder_of(qwen())}),
    "qwen 3 as it is": ("qwen3", "PreTrainedTokenizerFast", lambda: beginning(byte_level(qwen=True)), NEWER),
}  # fmt: skip


def theirs(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(str(folder), config=AutoConfig.from_pretrained(str(folder)))


@pytest.fixture(scope="module", params=[*KINDS, "demo"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PlainTokenizer, Any]:
    """A tokenizer of ours and transformers' of the same folder."""
    if request.param == "demo":
        folder, family = MODEL_PATH, json.loads((MODEL_PATH / "config.json").read_text())["model_type"]
    else:
        family, declared, make, settings = KINDS[request.param]
        folder = saved(tmp_path_factory.mktemp("tokenizer"), make(), family, declared, settings)
    plain = read_plain_tokenizer(folder, family)
    assert plain is not None
    return plain, theirs(folder)


def test_ids_and_texts(pair: tuple[PlainTokenizer, Any]) -> None:
    plain, hf = pair
    assert plain.get_vocab() == hf.get_vocab()
    assert len(plain) == len(hf)
    assert plain.special_tokens_map == hf.special_tokens_map
    assert (plain.eos_token_id, plain.bos_token_id) == (hf.eos_token_id, hf.bos_token_id)
    names = [*plain.get_vocab()]
    rng = random.Random(1)
    texts = [*TEXTS, *LINES, *random_texts(1, 200)]
    texts += [
        "".join(rng.choices([*SPECIAL, "<|endoftext|>", " ", "a b", "\n", "né", "<tool>"], k=5)) for _ in range(60)
    ]
    for text in texts:
        for special in (False, True):
            assert plain.encode(text, add_special_tokens=special) == hf.encode(text, add_special_tokens=special), text
    for _ in range(150):
        ids = [rng.randrange(len(names)) for _ in range(rng.randrange(1, 12))]
        for skip in (False, True):
            assert plain.decode(ids, skip_special_tokens=skip) == hf.decode(ids, skip_special_tokens=skip), ids


def test_the_engines_view_is_the_same(pair: tuple[PlainTokenizer, Any]) -> None:
    ours, other = (TextTokenizer(tokenizer, chat_template=TEMPLATE) for tokenizer in pair)
    assert ours.backend is not None
    assert (ours.table.mode, ours.table.special_ids) == (other.table.mode, other.table.special_ids)
    assert all(ours.table.token_bytes(token) == other.table.token_bytes(token) for token in range(other.table.size))
    for chat in CHATS[:3]:
        assert ours.render_chat(chat, [TOOL]) == other.render_chat(chat, [TOOL])
    left, right = (ChatTemplate(tokenizer, TEMPLATE) for tokenizer in pair)
    assert (left.settable, left.form) == (right.settable, right.form)
    again = pickle.loads(pickle.dumps(ours))
    assert again.encode(LINES[0]) == ours.encode(LINES[0])


def rendered(tokenizer: Any, chat: list[Settings], template: str = TEMPLATE, **more: Any) -> str | None:
    """The chat's text; None: it was refused. A `PlainTokenizer`'s chats are rendered as an engine does it."""
    try:
        if isinstance(tokenizer, PlainTokenizer):
            return ChatTemplate(tokenizer, template)._render(chat, **more)
        return str(tokenizer.apply_chat_template(chat, chat_template=template, tokenize=False, **more))
    except Exception:
        return None


FLAGS: list[Settings] = [
    {}, {"add_generation_prompt": True}, {"continue_final_message": True}, {"tools": [TOOL]},
    {"documents": [{"title": "t"}], "bos_token": "other"}, {"documents": ["text"]},
]  # fmt: skip


@pytest.mark.parametrize("pair", ["llama", "qwen 2", "demo"], indirect=True, scope="module")
@pytest.mark.parametrize("flags", FLAGS)
def test_chats(pair: tuple[PlainTokenizer, Any], flags: Settings) -> None:
    plain, hf = pair
    for chat in CHATS:
        assert rendered(plain, chat, **flags) == rendered(hf, chat, **flags), chat


SNIPPETS = table(__file__, "snippets of templates")


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_what_templates_can_do(snippet: str) -> None:
    plain: Any = read_plain_tokenizer(MODEL_PATH, "llama")
    hf = theirs(MODEL_PATH)
    for chat in CHATS[:2]:
        for continued in (False, True):
            ours, wanted = (rendered(each, chat, snippet, continue_final_message=continued) for each in (plain, hf))
            assert ours == wanted


def test_names_no_variable_may_have_are_transformers_arguments() -> None:
    taken = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    assert taken - {"self", "documents"} | {"messages"} == RESERVED


# -- left to transformers


def change(file: Path, act: Callable[[Any], object]) -> None:
    content = json.loads(file.read_text())
    act(content)
    file.write_text(json.dumps(content))


def first_added(**flags: Any) -> Callable[[Any], None]:
    return lambda content: next(t for t in content["added_tokens"] if t["content"] == "<|im_end|>").update(flags)


def without_merges(content: Any) -> None:
    content.clear()
    content.update(json.loads(unigram(fallback=False).to_str()))


CHANGED: dict[str, tuple[str, Callable[[Any], object]]] = {
    "a token that strips": ("llama", first_added(lstrip=True)),
    "a token that is not special": ("llama", first_added(special=False)),
    "no merges": ("llama", without_merges),
    "another split": (
        "qwen2", lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "x"}),
    ),
    "words before merges": ("qwen2", lambda content: content["model"].update(ignore_merges=True)),
    "gaps between ids": ("qwen2", lambda content: content["added_tokens"][-1].update(id=700)),
}  # fmt: skip
"""Changes within tokenizer.json."""
LEFT: dict[str, tuple[str, str, Any]] = {
    **cases_of(__file__), **{name: (family, "tokenizer.json", act) for name, (family, act) in CHANGED.items()},
}  # fmt: skip
"""Family, file, and its text or a change of it."""


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_left_to_transformers(kind: str, tmp_path: Path) -> None:
    family, name, content = LEFT[kind]
    make = qwen if family == "qwen2" else lambda: byte_level(qwen=True)
    folder = saved(tmp_path / "model", make(), family, "PreTrainedTokenizerFast", ENDS)
    assert read_plain_tokenizer(folder, family) is not None or family == "gemma"
    (folder / name).parent.mkdir(exist_ok=True)
    if isinstance(content, str):
        (folder / name).write_text(content)
    else:
        change(folder / name, content if callable(content) else lambda held: held.update(content))
    assert read_plain_tokenizer(folder, family) is None


def test_the_loaded_tokenizer_gives_transformers_own_on_demand(tmp_path: Path) -> None:
    shutil.copytree(MODEL_PATH, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    found = load_tokenizer(tmp_path, EngineConfig(), model_config=AutoConfig.from_pretrained(str(tmp_path)))
    assert found is not None
    assert isinstance(found.hf, PreTrainedTokenizerBase)
    assert found.hf is found.hf
    assert found.hf.encode(LINES[1]) == found.encode(LINES[1])
    assert isinstance(pickle.loads(pickle.dumps(found)).hf, PreTrainedTokenizerBase)


def test_tokenizers_of_one_file_share_their_table(tmp_path: Path) -> None:
    """No tokenizer has the table of a file that was changed since; a transformers tokenizer has its own."""
    folder = Path(shutil.copytree(MODEL_PATH, tmp_path / "model"))
    known = AutoConfig.from_pretrained(str(folder))

    def load() -> TextTokenizer:
        found = load_tokenizer(folder, EngineConfig(), model_config=known)
        assert found is not None
        return found

    first, second = load(), load()
    assert first.table is second.table
    assert TextTokenizer(first.hf).table is not first.table
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    last = content["added_tokens"][-1]
    last["content"] = last["content"][::-1]  # a file of the same size
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    third = load()
    assert third.table.token_bytes(last["id"]) == last["content"].encode() != first.table.token_bytes(last["id"])
