"""The outlines_core backend: exact languages, masks that never lead astray, nearest ends, and a process that dies."""

from __future__ import annotations

import gc
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncengine.errors import GrammarError, GrammarImpossible, GrammarTimeout, GrammarTooLarge, GrammarUnsupported
from asyncengine.grammar import outlines_core_worker
from asyncengine.grammar.outlines_core_backend import OutlinesCoreBackend
from asyncengine.grammar.outlines_core_template import OutlinesCoreTemplate
from asyncengine.grammar.spec import Grammar

WORDS = ["ab", "ba", "not", " enough", "1.", "日本", " 🙂", "a", '"}', '{"']  # "a" is also a byte: two ids, one text
VOCABULARY = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS] + [b"", b"<s>", b"</s>", b"ab"]
SPECIAL = (267, 268, 269)
EOS = (268, 269)  # 269 spells "ab", but ends the output
WIDTH = 300
SLOW = "(a{1,1000}){1,1000}"
LARGE = "[ab]*a[ab]{24}"


@pytest.fixture(scope="module")
def backend() -> Iterator[OutlinesCoreBackend]:
    backend = OutlinesCoreBackend(VOCABULARY, EOS, SPECIAL, WIDTH)
    yield backend
    backend.close()


def compiled(backend: OutlinesCoreBackend, pattern: str) -> OutlinesCoreTemplate:
    return backend.compile(Grammar("regex", pattern), 30)


def choice(*options: str) -> Grammar:
    return Grammar("choice", json.dumps(options))


def allowed(state: Any, width: int = WIDTH) -> list[int]:
    mask = np.full(-(-width // 32), -1, np.int32)
    state.fill(mask)
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def takes(template: OutlinesCoreTemplate, tokens: list[int]) -> bool:
    """Whether the tokens are a complete output; mask and `consume` must agree on the way."""
    state = template.new_state()
    for token in tokens:
        legal = token in allowed(state)
        assert state.consume(token) == legal
        if not legal:
            return False
    assert state.is_accepting() == (EOS[0] in allowed(state)) == (EOS[1] in allowed(state))
    return state.is_accepting()


def cuts(text: bytes) -> Iterator[list[int]]:
    """All ways to spell the text."""
    if not text:
        yield []
    for token, data in enumerate(VOCABULARY):
        if data and token not in SPECIAL and text.startswith(data):
            yield from ([token, *rest] for rest in cuts(text[len(data) :]))


def spelled(tokens: list[int]) -> str:
    return b"".join(VOCABULARY[token] for token in tokens).decode()


# ---------------------------------------------------------------- the language

PROBES = [
    (r"[0-9]+(\.[0-9]+)?", "1.a"),
    (r"[a-z]+( [a-z]+)*", "ab "),
    ("a|ab", "ab"),
    ("(a|ab)(1|ba1)?", "ab1"),
    ("a*?b?", "ab"),
    ("日本語", "日本語"),
    ("(🙂|é)( 🙂)*", "🙂é "),
    ("[^a]b{1,2}", "ab日"),
    (".{0,2}", "a\n🙂"),
    ("", "a"),
    ("^ab|a$", "ab"),
    (r"(?i)^A\.$", "aA."),
    (r"[]a^-]+\\?", "]a\\"),
    (r"[ab][.][$^]?\$", "a.$"),
]


@pytest.mark.parametrize(("pattern", "alphabet"), PROBES, ids=[pattern for pattern, _ in PROBES])
def test_language_is_that_of_fullmatch(backend: OutlinesCoreBackend, pattern: str, alphabet: str) -> None:
    """Every text of up to four letters, in every spelling."""
    template = compiled(backend, pattern)
    found = set()
    for size in range(5):
        for letters in itertools.product(alphabet, repeat=size):
            text = "".join(letters)
            expected = re.fullmatch(pattern, text) is not None
            found.add(expected)
            assert all(takes(template, tokens) == expected for tokens in cuts(text.encode())), text
    assert True in found


@pytest.mark.parametrize("options", [("not", "not enough information"), ("a", "ab", "aba"), ("a.b*", "(", "\\d\n\t-]")])
def test_choices_are_taken_letter_for_letter(backend: OutlinesCoreBackend, options: tuple[str, ...]) -> None:
    template = backend.compile(choice(*options), 30)
    for option in options:
        assert all(takes(template, tokens) for tokens in cuts(option.encode()))
        for wrong in (option[:-1], option + "a", option.replace(".", "x").replace("*", "b")):
            assert wrong in options or not takes(template, list(wrong.encode()))


@pytest.mark.parametrize(
    "pattern", [r"[a-z]+( [a-z]+)*\.", "(日本語|🙂){1,3}", r'\{"a": ([0-9]{1,3}|"[^"]{0,3}")\}', "(a|ab|[ab]{4})1"]
)
def test_random_walks_end_in_a_match(backend: OutlinesCoreBackend, pattern: str) -> None:
    """Whatever is allowed can be completed; the known way is the shortest and really is one."""
    rng = random.Random(0)
    template = compiled(backend, pattern)
    for _ in range(30):
        state, closing = template.new_state(), template.new_closing()
        tokens: list[int] = []
        budget = rng.randrange(template.min_tokens, template.min_tokens + 12)
        while not state.is_terminated():
            token = rng.choice(allowed(state))
            if token in EOS:
                break
            if not closing.advance(token, budget - len(tokens) - 1):
                if closing.cost == 0:
                    break
                token = closing.first()
                assert closing.advance(token, budget - len(tokens) - 1)
            assert state.consume(token)
            assert (closing.cost == 0) == state.is_accepting()
            tokens.append(token)
        assert len(tokens) <= budget
        assert re.fullmatch(pattern, spelled(tokens))


def test_ids_that_spell_no_text_are_never_allowed(backend: OutlinesCoreBackend) -> None:
    state = compiled(backend, r"(.|\n)*").new_state()
    start = [byte for byte in range(256) if byte < 0x80 or 0xC2 <= byte <= 0xF3]
    assert allowed(state) == [*start, *range(256, 266), *EOS]
    with pytest.raises(GrammarUnsupported, match="U\\+100000"):
        backend.compile(choice("\U00100000"), 30)


def test_without_single_bytes_dead_ends_are_avoided() -> None:
    """A vocabulary that can begin a word and not finish it."""
    backend = OutlinesCoreBackend([b"x", b"ab", b"abc", b"d"], [3], [], 4)
    try:
        template = compiled(backend, "xab?|ab[cd]|xy")
        assert allowed(template.new_state(), 4) == [0, 2]
        template = compiled(backend, "abc|abd")
        assert allowed(template.new_state(), 4) == [2]
        assert template.new_state().forced() == [2]
        with pytest.raises(GrammarImpossible):
            compiled(backend, "abd")
    finally:
        backend.close()


def test_model_without_an_end_of_sequence() -> None:
    backend = OutlinesCoreBackend([b"a", b"b"], [], [], 2)
    try:
        state = compiled(backend, "a|ab").new_state()
        assert state.consume(0)
        assert state.is_accepting()
        assert allowed(state, 2) == [1]
    finally:
        backend.close()


# ---------------------------------------------------------------- states and closings


def test_end_of_sequence_and_rollback(backend: OutlinesCoreBackend) -> None:
    template = compiled(backend, "(ab)+1?")
    state = template.new_state()
    history = []
    for token in [256] * 100 + [49]:
        assert not state.is_terminated()
        history.append(allowed(state))
        assert state.consume(token)
    assert state.is_terminated()
    assert allowed(state) == list(EOS)
    for end in EOS:
        assert state.consume(end)
        assert state.is_accepting()
        assert state.is_terminated()
        assert allowed(state) == list(EOS)
        assert not state.consume(97)
    state.rollback(2)
    assert state.is_terminated()
    for before in reversed(history):
        state.rollback(1)
        assert allowed(state) == before
    assert not any(state.consume(end) for end in EOS)
    with pytest.raises(ValueError, match="cannot roll back"):
        state.rollback(1)


@pytest.mark.parametrize("token", [-1, 299, 300, 10**9, SPECIAL[0], 256])
def test_refused_tokens_change_nothing(backend: OutlinesCoreBackend, token: int) -> None:
    template = compiled(backend, "1+")
    state, closing = template.new_state(), template.new_closing()
    assert not state.consume(token)
    assert not closing.advance(token, 100)
    assert allowed(state) == [49]
    assert (closing.cost, closing.first()) == (1, 49)


def test_closing_is_the_true_minimum(backend: OutlinesCoreBackend) -> None:
    """No shorter token sequence spells a match, from any prefix."""
    pattern = "(not|a1){2}(ab|ba)"
    template = compiled(backend, pattern)
    assert template.min_tokens == 3
    small = [258, 97, 110, 111, 116, 49, 256, 257]
    for size in range(3):
        for tokens in itertools.product(small, repeat=size):
            closing = template.new_closing()
            if all(closing.advance(token, 1000) for token in tokens):
                shortest = next(
                    more
                    for more in range(5)
                    for rest in itertools.product(small, repeat=more)
                    if re.fullmatch(pattern.encode(), b"".join(VOCABULARY[t] for t in (*tokens, *rest)))
                )
                assert closing.cost == shortest
                assert not shortest or closing.advance(closing.first(), shortest - 1)


def test_closing_respects_the_budget(backend: OutlinesCoreBackend) -> None:
    closing = compiled(backend, "1[ab]{8}|2").new_closing()
    assert closing.cost == 1
    assert not closing.advance(49, 3)
    assert closing.advance(49, 4)
    assert closing.cost == 4  # "ab" and "ba" are tokens
    assert not closing.advance(EOS[0], 100)
    for _ in range(4):
        assert closing.advance(closing.first(), closing.cost - 1)
    assert closing.cost == 0
    assert closing.advance(EOS[0], 0)


def test_forced_tokens_are_those_without_a_choice(backend: OutlinesCoreBackend) -> None:
    state = compiled(backend, "xyz(1|2)x").new_state()
    assert state.forced() == list(b"xyz")
    assert all(map(state.consume, b"xyz"))
    assert state.forced() == []
    assert state.consume(49)
    assert state.forced() == [120]
    assert state.consume(120)
    assert state.forced() == []
    optional = compiled(backend, "x?").new_state()
    assert optional.forced() == []
    assert compiled(backend, "x{500}").new_state().forced() == [120] * 64


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("pattern", "error", "reason"),
    [
        ("(a$|b)", GrammarUnsupported, r"'\$' at character 2"),
        (r"a\b", GrammarUnsupported, r"\\\\b"),
        ("(^a)", GrammarUnsupported, r"\^"),
        ("(?=a)b", GrammarUnsupported, "look-around"),
        ("(?<!a)b", GrammarUnsupported, "look-around"),
        (r"(a)\1", GrammarUnsupported, "back-reference"),
        ("(?x)a # b", GrammarUnsupported, "verbose"),
        ("(?i-sx:a)[", GrammarError, "unterminated character"),
        ("a)|(b", GrammarError, "unbalanced"),
        ("(a", GrammarError, "unterminated subpattern"),
        ("a{2,1}", GrammarError, "min repeat greater than max"),
        ("a{5", GrammarError, "outlines_core refuses"),
        ("a\\", GrammarError, "bad escape"),
        ("(" * 300 + ")" * 300, GrammarError, "outlines_core refuses"),
        (r"a\x{10FFFF}", GrammarImpossible, "cannot spell"),
        ("[a&&b]", GrammarImpossible, "cannot spell"),
    ],
)
def test_patterns_it_cannot_do_are_refused(
    backend: OutlinesCoreBackend, pattern: str, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        compiled(backend, pattern)


def test_other_grammars_are_sent_to_llguidance(backend: OutlinesCoreBackend) -> None:
    with pytest.raises(GrammarUnsupported, match="use llguidance"):
        backend.compile(Grammar("lark", "start: /a/"), 30)


# ---------------------------------------------------------------- the process


def pid_of(backend: OutlinesCoreBackend) -> int:
    assert backend._process is not None
    return backend._process._popen.pid


def gone(pid: int) -> bool:
    """Ended, if perhaps not yet waited for by whoever inherited it."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat")
        return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 120
    while not gone(pid):
        assert time.monotonic() < deadline, "the process lives on"
        time.sleep(0.01)


def held() -> tuple[int, int]:
    """Threads and open files of this process."""
    gc.collect()
    files = Path("/proc/self/fd")
    return threading.active_count(), len(list(files.iterdir())) if files.exists() else 0


def test_a_slow_pattern_is_killed_and_nothing_stays() -> None:
    before = held()
    backend = OutlinesCoreBackend(VOCABULARY, EOS, SPECIAL, WIDTH)
    assert takes(compiled(backend, "a|ab"), [256])
    killed = pid_of(backend)
    with pytest.raises(GrammarTimeout, match=r"0\.2 s"):
        backend.compile(Grammar("regex", SLOW), 0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(killed, 0)
    assert takes(compiled(backend, "a|ab"), [256])  # as if nothing had happened
    second = pid_of(backend)
    assert second != killed
    assert compiled(backend, "a").min_tokens == 1
    assert pid_of(backend) == second  # a process that answers is kept
    backend.close()
    backend.close()
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)
    with pytest.raises(GrammarError, match="closed"):
        compiled(backend, "a")
    assert all(now <= then for now, then in zip(held(), before, strict=True))  # others' may have ended meanwhile


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of address space is enforced on Linux")
def test_the_memory_limit_is_named() -> None:
    backend = OutlinesCoreBackend(VOCABULARY, EOS, SPECIAL, WIDTH, memory_limit=300 << 20)
    try:
        for pattern in ("(((a{1,100}){1,100}){1,100}){1,100}", "a{100000000}", LARGE):
            with pytest.raises(GrammarTooLarge, match="memory_limit=300 MiB"):
                compiled(backend, pattern)
        assert compiled(backend, "a").min_tokens == 1
    finally:
        backend.close()


def test_the_size_limit_is_named() -> None:
    backend = OutlinesCoreBackend(VOCABULARY, EOS, SPECIAL, WIDTH, max_index_bytes=1 << 20)
    try:
        assert compiled(backend, "[a-z]{50}").min_tokens == 17  # "not" 16 times, "ab"
        process = pid_of(backend)
        with pytest.raises(GrammarTooLarge, match="max_index_bytes=1 MiB"):
            compiled(backend, "[a-z]{5000}")
        assert pid_of(backend) == process
    finally:
        backend.close()


def test_huge_choice_is_compiled_or_refused(backend: OutlinesCoreBackend) -> None:
    rng = random.Random(0)
    options = ["".join(rng.choices("abcdefgh", k=12)) for _ in range(2000)]
    template = backend.compile(choice(*options), 30)
    assert template.new_state().forced() == []
    assert takes(template, list(options[1234].encode()))


def test_closing_while_it_compiles() -> None:
    backend = OutlinesCoreBackend(VOCABULARY, EOS, SPECIAL, WIDTH)
    compiled(backend, "a")
    process = pid_of(backend)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            backend.compile(Grammar("regex", SLOW), 60)
        except GrammarError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    while backend._process is not None and backend._process.idle:
        time.sleep(0.001)
    with pytest.raises(GrammarTimeout):  # one at a time: waiting for its turn counts
        backend.compile(Grammar("regex", "a"), 0.05)
    backend.close()
    thread.join(120)
    assert [str(error) for error in errors] == ["grammar: the outlines_core backend was closed"]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_threads_may_share_a_backend(backend: OutlinesCoreBackend) -> None:
    found: dict[int, int] = {}

    def work(size: int) -> None:
        found[size] = compiled(backend, f"x{{{size}}}").min_tokens

    threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {size: size for size in range(1, 9)}


def test_dropping_the_backend_ends_the_process() -> None:
    backend = OutlinesCoreBackend(VOCABULARY, EOS, SPECIAL, WIDTH)
    compiled(backend, "a")
    process = pid_of(backend)
    del backend
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_ctrl_c_is_not_for_it(backend: OutlinesCoreBackend) -> None:
    compiled(backend, "a")
    process = pid_of(backend)
    assert os.getsid(process) != os.getsid(0)
    os.kill(process, signal.SIGINT)
    assert compiled(backend, "ab").min_tokens == 1
    assert pid_of(backend) == process


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads what a process has mapped")
def test_it_never_loads_torch(backend: OutlinesCoreBackend) -> None:
    compiled(backend, "a")
    mapped = Path(f"/proc/{pid_of(backend)}/maps").read_text()
    assert "outlines_core" in mapped
    assert "torch" not in mapped


SCRIPT = """
import os, sys, threading, time
print("imported", flush=True)
from asyncengine.grammar.outlines_core_backend import OutlinesCoreBackend
from asyncengine.grammar.spec import Grammar
backend = OutlinesCoreBackend([bytes([b]) for b in range(256)], [256], [256], 257)
print(backend.compile(Grammar("regex", "abc"), 30).min_tokens, backend._process._popen.pid, flush=True)
if sys.argv[1] == "busy":
    threading.Thread(target=backend.compile, args=(Grammar("regex", "[ab]*a[ab]{24}"), 100), daemon=True).start()
    while backend._process.idle: time.sleep(0.001)
    time.sleep(0.2)
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("manner", ["exit", "busy"])
def test_a_plain_script_may_use_it_and_take_it_along(tmp_path: Path, manner: str) -> None:
    """No `if __name__ == "__main__"`; and when the script ends, even killed while it compiles, so does the process."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")]))
    run = subprocess.run(
        [sys.executable, str(script), manner],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert run.returncode == (-9 if manner == "busy" else 0), run.stderr
    first, second = run.stdout.splitlines()
    assert first == "imported"
    assert second.split()[0] == "3"
    until_gone(int(second.split()[1]))


def test_frames_are_whole_or_none(tmp_path: Path) -> None:
    path = tmp_path / "frames"
    with path.open("wb") as out:
        outlines_core_worker.write_frame(out, b"ab", b"c")
    for cut, expected in ((0, None), (3, None), (10, None), (11, b"abc")):
        (tmp_path / "cut").write_bytes(path.read_bytes()[:cut])
        with (tmp_path / "cut").open("rb") as stream:
            assert outlines_core_worker.read_frame(stream) == expected
