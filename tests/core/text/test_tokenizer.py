"""Loading, encoding and concurrent use of a tokenizer."""

from __future__ import annotations

import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from core.text.tokenizer_zoo import LINES, byte_level, fast

from asyncengine.config import EngineConfig
from asyncengine.errors import ContextLengthExceeded, InvalidParameter, ModelNotFound, UnsupportedModel
from asyncengine.text.token_table import TokenTable
from asyncengine.text.tokenizer import TextTokenizer, load_tokenizer

CONFIG = EngineConfig()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    fast(byte_level(qwen=True), eos_token="<|im_end|>", bos_token="<s>").save_pretrained(path)
    return path


def load(folder: Path) -> TextTokenizer:
    tokenizer = load_tokenizer(folder, CONFIG)
    assert tokenizer is not None
    return tokenizer


def test_loaded_tokenizer_encodes_and_decodes(folder: Path) -> None:
    tokenizer = load(folder)
    ids = tokenizer.encode("Grüße, 世界 👩‍👩‍👧‍👦<|im_end|>")
    assert tokenizer.decode(ids) == "Grüße, 世界 👩‍👩‍👧‍👦"
    assert tokenizer.decode(ids, skip_special_tokens=False).endswith("<|im_end|>")
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.vocab_size == tokenizer.table.size == 528
    assert tokenizer.encode("") == []
    assert tokenizer.decode([tokenizer.vocab_size + 7, -1]) == ""


def test_what_ends_an_answer_is_the_end_of_sequence_unless_more_is_known(folder: Path) -> None:
    tokenizer = load(folder)
    assert tokenizer.end_token_ids == (tokenizer.eos_token_id,)
    assert TextTokenizer(tokenizer.hf, end_token_ids=[5, 3]).end_token_ids == (5, 3)
    assert TextTokenizer(fast(byte_level(qwen=True))).end_token_ids == ()


def test_a_template_that_lies_beside_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    """Older models that read images have theirs there. A tokenizer's own goes first; what is no template is none."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "chat_template.json"
    for content in ("[", "[]", '{"chat_template": 1}'):
        file.write_text(content)
        assert not load(tmp_path).has_chat_template
    file.write_text(json.dumps({"chat_template": "{{ messages[0].content }}!"}))
    chat = [{"role": "user", "content": "hi"}]
    assert load(tmp_path).render_chat(chat) == "hi!"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert load(tmp_path).render_chat(chat) == "own"


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    """None where there is no tokenizer; a broken one, one with code of its own and a missing folder are refused."""
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer(tmp_path, CONFIG) is None
    with pytest.raises(ModelNotFound):
        load_tokenizer(tmp_path / "missing", CONFIG)
    (tmp_path / "own.py").write_text("raise SystemExit('code of the model ran')")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedModel, match="trust_remote_code=True"):
        load_tokenizer(tmp_path, CONFIG)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer.json").write_text("{ not json")
    with pytest.raises(ModelNotFound, match="no usable tokenizer"):
        load_tokenizer(tmp_path, CONFIG)


@pytest.mark.parametrize("prompt", [None, 5, b"bytes", ["a"]])
def test_a_prompt_must_be_a_string(folder: Path, prompt: object) -> None:
    with pytest.raises(InvalidParameter, match="prompt: must be a str"):
        load(folder).encode(prompt)  # type: ignore[arg-type]


def test_lone_surrogates_are_refused(folder: Path) -> None:
    with pytest.raises(InvalidParameter, match="not valid Unicode"):
        load(folder).encode("broken \ud83d emoji")


@pytest.mark.parametrize("direct", [True, False])
def test_eight_threads_at_once(folder: Path, direct: bool) -> None:
    """The settings a tokenizer.json brings along (truncation, padding) neither apply nor race."""
    hf = fast(byte_level(qwen=True), eos_token="<|im_end|>")
    hf.backend_tokenizer.enable_truncation(4)
    hf.backend_tokenizer.enable_padding(length=9)
    tokenizer = TextTokenizer(hf)
    assert tokenizer.backend is not None
    if not direct:
        tokenizer.backend = None  # as for a tokenizer whose wrapper does more than its backend
    plain = byte_level(qwen=True)
    expected = {line: plain.encode(line).ids for line in LINES}
    barrier = threading.Barrier(8)

    def work(number: int) -> bool:
        barrier.wait()
        texts = LINES[number % 6 :] * 5
        return all(tokenizer.encode(t) == expected[t] and tokenizer.decode(expected[t]) for t in texts)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
        assert len(expected[LINES[0]]) > 9


def test_threads_build_one_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[TokenTable] = []

    class Counted(TokenTable):
        def __init__(self, tokenizer: object) -> None:
            super().__init__(tokenizer)
            built.append(self)

    monkeypatch.setattr("asyncengine.text.token_table.TokenTable", Counted)
    tokenizer = load(folder)
    with ThreadPoolExecutor(8) as pool:
        tables = set(pool.map(lambda _: tokenizer.table, range(32)))
    assert tables == set(built)
    assert len(built) == 1


class Counting:
    """A Rust tokenizer that counts what is asked of it."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.batches, self.alone = backend, 0, 0

    def encode(self, text: str, **options: Any) -> Any:
        self.alone += 1
        return self._backend.encode(text, **options)

    def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
        self.batches += 1
        return self._backend.encode_batch_fast(texts, **options)


def test_a_long_text_is_encoded_so_that_other_threads_run(folder: Path) -> None:
    """The library lets the interpreter's lock go for a batch only."""
    tokenizer = load(folder)
    text = "Grüße, 世界 <|im_end|> and more. " * 1000
    for special in (False, True):
        alone = load(folder).backend.encode(text, add_special_tokens=special).ids  # type: ignore[union-attr]
        tokenizer.backend = counting = Counting(load(folder).backend)
        assert tokenizer.encode(text, special) == alone
        assert (counting.batches, counting.alone) == (1, 0)


def test_a_text_that_cannot_fit_is_refused_without_being_encoded(folder: Path) -> None:
    tokenizer = load(folder)
    tokenizer.backend = None
    tokenizer.check_fits("prompt", "a" * 100, 100)
    with pytest.raises(ContextLengthExceeded, match="must not exceed") as refused:
        tokenizer.check_fits("prompt", "a" * 10**6, 100)
    assert refused.value.field == "prompt"
