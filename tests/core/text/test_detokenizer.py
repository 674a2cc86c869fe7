"""Streamed text equals decoding everything at once, for every kind of tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from core.text.tokenizer_zoo import KINDS, LINES
from support.long import TIMES

from asyncengine.text.token_table import TokenTable

SEQUENCES = 2000
SMILE = "\U0001f642".encode()


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, Any, TokenTable]:
    tokenizer = KINDS[request.param][1]()
    return request.param, tokenizer, TokenTable(tokenizer)


def build(name: str) -> tuple[Any, TokenTable]:
    tokenizer = KINDS[name][1]()
    return tokenizer, TokenTable(tokenizer)


def encode(tokenizer: Any, text: str) -> list[int]:
    encoded = tokenizer.encode(text)
    return list(getattr(encoded, "ids", encoded))


def random_ids(tokenizer: Any, table: TokenTable, rng: random.Random) -> Iterator[list[int]]:
    """Uniform ids, partial characters, special tokens, real text, and real text with a few ids changed."""
    every = range(table.size)
    partial = [i for i in every if "\ufffd" in table.token_text(i)] or every
    texts = [encode(tokenizer, line) for line in LINES[:6]]
    for number in range(SEQUENCES):
        if number % 3 == 0:
            ids = rng.choices(every, k=rng.randrange(0, 20))
        elif number % 3 == 1:
            pools = [every, partial, partial, sorted(table.special_ids) or every]
            ids = [rng.choice(rng.choice(pools)) for _ in range(rng.randrange(1, 24))]
        else:
            text = rng.choice(texts)
            start = rng.randrange(len(text))
            ids = text[start : start + rng.randrange(1, 60)]
            for _ in range(rng.randrange(3)):
                ids[rng.randrange(len(ids))] = rng.choice(every)
        yield ids


def chunks(ids: list[int], rng: random.Random) -> Iterator[list[int]]:
    at = 0
    while at < len(ids):
        step = rng.choice((0, 1, 1, 2, 3, 7))
        yield ids[at : at + step]
        at += step


def test_the_expected_plan_is_found(kind: tuple[str, Any, TokenTable]) -> None:
    name, _, table = kind
    assert table.mode == KINDS[name][0]


def test_joined_text_equals_the_full_decoding(kind: tuple[str, Any, TokenTable]) -> None:
    _, tokenizer, table = kind
    rng = random.Random(7)
    for ids in random_ids(tokenizer, table, rng):
        for skip in (True, False):
            whole = tokenizer.decode(ids, skip_special_tokens=skip) if ids else ""
            parts = [[token] for token in ids] if skip else list(chunks(ids, rng))
            detokenizer = table.stream(skip_special_tokens=skip)
            text = ""
            for part in parts:
                text += detokenizer.push(part)
                assert whole.startswith(text), (ids, text, whole)
            text += detokenizer.finish()
            assert text == whole, (ids, skip)


def test_a_long_output_is_exact_and_flows(kind: tuple[str, Any, TokenTable]) -> None:
    """Windows move, and every plan but the last shows nearly all text before the end."""
    _, tokenizer, table = kind
    ids = [token for line in LINES for token in encode(tokenizer, line)]
    detokenizer = table.stream()
    shown = "".join(detokenizer.push([token]) for token in ids)
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    assert shown + detokenizer.finish() == whole
    if table.mode != "whole":
        assert len(shown) >= len(whole) - 60
    else:
        assert shown == ""


@pytest.mark.parametrize("name", ["suffix-bpe", "nameless-bytes"])
def test_a_window_holds_back_no_more_than_it_must(name: str) -> None:
    tokenizer, table = build(name)
    ids = encode(tokenizer, "quick brown fox")
    for count in range(len(ids)):
        shown = table.stream().push(ids[: count + 1])
        whole = tokenizer.decode(ids[: count + 1], skip_special_tokens=True)
        newest = tokenizer.decode(ids[count : count + 1], skip_special_tokens=True)
        assert len(whole) - len(shown) <= len(newest) + 1, "the newest token and the space before it"


def test_long_runs_of_one_token(kind: tuple[str, Any, TokenTable]) -> None:
    """Repeated bytes that are no character, repeated spaces, repeats a decoder folds into one."""
    _, tokenizer, table = kind
    for token in random.Random(3).sample(range(table.size), min(12 * TIMES, table.size)):
        ids = [token] * 150 + [0, 1] + [token] * 150
        detokenizer = table.stream(skip_special_tokens=False)
        text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish()
        assert text == tokenizer.decode(ids, skip_special_tokens=False)


def test_ids_beyond_the_tokenizer_have_no_text(kind: tuple[str, Any, TokenTable]) -> None:
    """Models pad their vocabulary; sampling may pick such an id at any place."""
    _, tokenizer, table = kind
    ids = encode(tokenizer, LINES[0])
    detokenizer = table.stream()
    text = "".join(detokenizer.push([table.size + 5, token, table.size]) for token in ids) + detokenizer.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["gpt2", "qwen"])
def test_byte_level_holds_back_exactly_the_incomplete_character(name: str) -> None:
    _, table = build(name)
    single = {table.token_bytes(i): i for i in range(table.size) if i not in table.special_ids}
    detokenizer = table.stream()
    assert [detokenizer.push([single[bytes([b])]]) for b in SMILE] == ["", "", "", "\U0001f642"]
    assert detokenizer.push([single[b"\xf0"]]) == ""
    assert detokenizer.push([single[b"a"]]) == "\ufffda"
    assert detokenizer.push([single[b"\xe2"], single[b"\xed"]]) == "\ufffd"
    assert detokenizer.push([single[b"\xa0"], single[b"a"]]) == "\ufffd\ufffda"  # a surrogate is no character
    assert detokenizer.push([single[b"\xe2"], single[b"\x80"]]) == ""
    assert detokenizer.finish() == "\ufffd"


def test_a_special_token_inside_a_character_is_skipped() -> None:
    tokenizer, table = build("qwen")
    single = {table.token_bytes(i): i for i in range(table.size) if i not in table.special_ids}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [single[bytes([b])] for b in SMILE]
    detokenizer = table.stream()
    assert "".join(detokenizer.push([i, end]) for i in ids) == "\U0001f642"


def test_a_run_of_byte_tokens_is_held_until_it_ends() -> None:
    """One bad byte turns the whole run into U+FFFD, so nothing of it is certain before."""
    tokenizer, table = build("llama2")
    byte = {value: tokenizer.convert_tokens_to_ids(f"<0x{value:02X}>") for value in range(256)}
    the = tokenizer.convert_tokens_to_ids("e")
    good, bad = table.stream(), table.stream()
    assert [good.push([byte[b]]) for b in SMILE] == [""] * 4
    assert good.push([the]) == "\U0001f642e"
    assert [bad.push([byte[b]]) for b in (*SMILE, 0xFF)] == [""] * 5
    assert bad.push([the]) == "\ufffd" * 5 + "e"


@pytest.mark.parametrize("name", ["llama2", "unigram"])
def test_only_the_first_token_loses_its_space(name: str) -> None:
    tokenizer, table = build(name)
    word = next(i for i in range(table.size) if table.token_text(i).strip() and table.token_text(i)[0] == " ")
    detokenizer = table.stream()
    begin = tokenizer.convert_tokens_to_ids("<s>")
    assert detokenizer.push([begin, word]) == table.token_text(word)[1:]
    assert detokenizer.push([word]) == table.token_text(word)


def test_token_bytes_join_to_the_text(kind: tuple[str, Any, TokenTable]) -> None:
    """A token's bytes are those of the token alone where text depends on neighbours."""
    _, tokenizer, table = kind
    if table.mode not in ("bytes", "pieces"):
        alone = [tokenizer.decode([i], skip_special_tokens=False) for i in range(table.size)]
        assert [table.token_text(i) for i in range(table.size)] == alone
    for line in LINES[:6] if table.mode in ("bytes", "pieces") else ():
        ids = encode(tokenizer, "e " + line)
        rest = b"".join(map(table.token_bytes, ids[1:])).decode()
        assert tokenizer.decode(ids, skip_special_tokens=False) == tokenizer.decode(ids[:1]) + rest
    assert table.token_bytes(table.size) == table.token_bytes(-1) == b""
    assert all(table.token_text(i) == table.token_bytes(i).decode("utf-8", "replace") for i in range(table.size))


def test_special_tokens_have_the_bytes_of_their_name() -> None:
    tokenizer, table = build("qwen")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end in table.special_ids
    assert table.token_bytes(end) == b"<|im_end|>"
    assert tokenizer.convert_tokens_to_ids("<tool>") not in table.special_ids


def test_a_table_is_shared_by_threads() -> None:
    tokenizer, table = build("llama2")
    ids = [token for line in LINES for token in encode(tokenizer, line)]
    whole = tokenizer.decode(ids, skip_special_tokens=True)

    def stream(_: int) -> str:
        detokenizer = table.stream()
        return "".join([detokenizer.push([token]) for token in ids]) + detokenizer.finish()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(stream, range(64))) == {whole}


def test_a_wrong_plan_is_found_out() -> None:
    """The proof must be able to fail: the byte plan with one wrong token is refused."""
    _, table = build("gpt2")
    data = [table.token_bytes(i) for i in range(table.size)]
    assert table._agrees(table._byte_plan(data))
    letter = data.index(b"e")
    assert not table._agrees(table._byte_plan([*data[:letter], b"\xc3", *data[letter + 1 :]]))
