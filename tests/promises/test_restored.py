"""Prefixes that were kept on a disk: who starts from them after a restart answers as if they had been computed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.demo_gguf import write_demo
from support.long import LONG
from support.tiny_models import VOCAB, make_checkpoint

from asyncengine import AsyncEngine, InvalidParameter, SamplingParams
from asyncengine.engine import prefix_store
from asyncengine.outputs import Completion

NEW = 6
PROMPT = [3 + (7 * place) % (VOCAB - 3) for place in range(84)]
OTHER = [*PROMPT[:50], *(3 + (5 * place) % (VOCAB - 3) for place in range(30))]
PARAMS = SamplingParams(max_tokens=NEW, temperature=0, logprobs=True, top_logprobs=3, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "show_progress": False}


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models compute faster than any disk reads."""
    monkeypatch.setattr(prefix_store, "WORTH", 1e9)
    monkeypatch.setattr(prefix_store, "LEAST_PATIENCE", 100.0)


def made_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that makes the checkpoint of a family, once, and returns its path."""

    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        if family != "gguf":
            return make_checkpoint(family, folder)
        write_demo(folder / "demo.gguf", "Q4_K_M")
        return folder / "demo.gguf"

    return cache(make)


checkpoint = pytest.fixture(made_once, scope="module")


def scores(answer: Completion) -> list[Any]:
    """Tokens and log-probabilities, to the bit."""
    assert answer.logprobs is not None
    return [
        (each.token_id, each.logprob, [(top.token_id, top.logprob) for top in each.top]) for each in answer.logprobs
    ]


def flat(found: list[list[Any]]) -> list[float]:
    """All numbers of the `scores` of some answers."""
    return [
        number
        for answer in found
        for token, logprob, top in answer
        for pair in ((token, logprob), *top)
        for number in pair
    ]


async def ask(path: Path, **settings: Any) -> tuple[list[list[Any]], list[int], AsyncEngine]:
    """Scores of three requests, one behind the other, the last one a second turn of the first; the tokens of each that
    were read from a disk; and the engine, which has ended."""
    found, restored = [], []
    async with await AsyncEngine.from_pretrained(path, **{**SETTINGS, **settings}) as engine:
        options = {"adapter": "mine"} if "adapters" in settings else {}
        first = await engine.generate(PROMPT, PARAMS, **options)
        again = await engine.generate([*PROMPT, *first.token_ids, *PROMPT[:40]], PARAMS, **options)
        other = await engine.generate(OTHER, PARAMS, **options)
        for answer in (first, again, other):
            found.append(scores(answer))
            restored.append(answer.usage.restored_tokens)
            assert restored[-1] <= answer.usage.cached_tokens
    return found, restored, engine


FAMILIES = {
    "qwen3": {}, "llama": {"quantization": "int4"}, "mistral": {}, "gemma3": {}, "gpt-oss": {}, "qwen3moe": {},
    "qwen3.5": {}, "falcon-h1": {}, "lfm2": {}, "deepseek-v3": {}, "gguf": {"dtype": "auto"},
    "starcoder2": {"attention_backend": "torch"}, "gemma2": {"kv_cache_dtype": "int8"},
    "qwen3.5, untied": {"kv_cache_dtype": "int8"},
}  # fmt: skip
ONE_OF_EACH = ("llama", "gemma3", "qwen3moe", "qwen3.5", "falcon-h1", "deepseek-v3", "starcoder2", "gemma2")
"""Families that the short form asks: pages of one pool and of two, experts, states of two kinds, latent pages, torch's
layout, bytes.
test_prefix_files.py imports those of GGUF files."""


@pytest.mark.parametrize("family", FAMILIES if LONG else ONE_OF_EACH)
async def test_restored_equals_computed_to_the_bit(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """With torch's attention, which rounds otherwise in other chunks, to 1e-5."""
    path, settings = checkpoint(family), FAMILIES[family]
    expected, _, _ = await ask(path, **settings)
    kept = {**settings, "kv_cache_dir": tmp_path}
    assert (await ask(path, **kept))[:2] == (expected, [0, 0, 0])
    found, restored, engine = await ask(path, **kept)
    if engine.info.batch_variance is None:
        assert found == expected
    else:  # torch's attention sums what follows a restored prefix in another order than the whole prompt
        assert flat(found) == pytest.approx(flat(expected), rel=0, abs=1e-5)
    assert restored[0] >= 64
    stats = engine.stats()
    assert stats.restored_tokens == sum(restored)
    assert stats.stored.bytes_read > 0
    assert (stats.stored.damaged, stats.stored.failures) == (0, 0)


@pytest.mark.parametrize("family", FAMILIES if LONG else ("llama", "gemma3", "mistral", "falcon-h1"))
async def test_what_is_evicted_is_restored_to_the_bit(
    family: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """In the same process, and by one that comes after it has closed."""
    path, settings = checkpoint(family), {**FAMILIES[family], "kv_cache_memory": "400KB", "max_num_seqs": 2}
    expected, _, _ = await ask(path, **settings)
    kept = {**settings, "kv_cache_dir": tmp_path, "kv_cache_write": "on_eviction"}
    async with await AsyncEngine.from_pretrained(path, **{**SETTINGS, **kept}) as engine:
        [store] = engine.core.loop.sources.tiers
        assert scores(await engine.generate(PROMPT, PARAMS)) == expected[0]
        store.flush(60)
        assert engine.stats().stored.bytes_written == 0
        for start in range(20):
            await engine.generate([3 + start, *PROMPT[:70]], PARAMS)
        store.flush(60)
        again = await engine.generate(PROMPT, PARAMS)
        assert again.usage.restored_tokens >= 64
        assert scores(again) == expected[0]
        other = await engine.generate(OTHER, PARAMS)
        await engine.sleep(weights="keep")
        await engine.wake()
        slept = await engine.generate(OTHER, PARAMS)
        assert slept.usage.restored_tokens >= 64
        assert scores(slept) == scores(other)
    found, restored, engine = await ask(path, **kept)
    assert found == expected
    assert restored[0] >= 64
    assert (engine.stats().stored.damaged, engine.stats().stored.failures) == (0, 0)


async def test_another_model_type_or_adapter_finds_nothing(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """All in one folder."""
    llama = checkpoint("llama")
    kinds: list[tuple[Path, dict[str, Any]]] = [
        (llama, {}), (llama, {"quantization": "int8"}), (llama, {"dtype": "bfloat16"}), (llama, {"page_size": 8}),
        (llama, {"attention_backend": "torch"}), (llama, {"kv_cache_dtype": "int8"}),
        (make_checkpoint("llama", tmp_path / "other", seed=1), {}),
    ]  # fmt: skip
    for path, settings in kinds:
        _, restored, _ = await ask(path, kv_cache_dir=tmp_path / "kv", **settings)
        assert restored == [0, 0, 0], settings
    for path, settings in kinds[:1] + kinds[-1:]:
        _, restored, _ = await ask(path, kv_cache_dir=tmp_path / "kv", **settings)
        assert restored[0] >= 64, settings


async def test_adapters_have_prefixes_of_their_own(tmp_path: Path) -> None:
    from support.peft_checkpoints import make_peft, tiny_llama

    def model() -> Any:
        return tiny_llama(vocab_size=VOCAB, max_position_embeddings=400)

    model().save_pretrained(tmp_path / "model")
    one, two = tmp_path / "one", tmp_path / "two"
    for seed, folder in enumerate((one, two)):
        make_peft(model(), seed).save_pretrained(folder)
    expected, _, _ = await ask(tmp_path / "model", adapters={"mine": str(one)})
    kept = {"kv_cache_dir": tmp_path / "kv"}
    for adapter, restores in ((one, False), (two, False), (one, True)):
        found, restored, _ = await ask(tmp_path / "model", adapters={"mine": str(adapter)}, **kept)
        assert (restored[0] >= 64) is restores
        assert (found == expected) is (adapter is one)
    assert (await ask(tmp_path / "model", **kept))[1][0] == 0


async def test_salted_prefixes_are_not_written_unless_asked_for(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    for salted in (False, True):
        for again in (False, True):
            async with await AsyncEngine.from_pretrained(
                checkpoint("llama"), **SETTINGS, kv_cache_dir=tmp_path, kv_cache_salted=salted
            ) as engine:
                answer = await engine.generate(PROMPT, PARAMS, cache_salt="tenant")
                assert (answer.usage.restored_tokens > 0) is (salted and again)


async def test_other_weights_are_not_mixed_with_what_is_stored(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    other = load_file(make_checkpoint("llama", tmp_path / "other", seed=1) / "model.safetensors")
    expected, _, _ = await ask(tmp_path / "other")
    kept = {**SETTINGS, "kv_cache_dir": tmp_path / "kv"}
    await ask(checkpoint("llama"), **kept)
    async with await AsyncEngine.from_pretrained(checkpoint("llama"), **kept) as engine:
        assert (await engine.generate(PROMPT, PARAMS)).usage.restored_tokens >= 64
        await engine.update_weights(other)
        answer = await engine.generate(PROMPT, PARAMS)
        assert scores(answer) == expected[0]
        assert answer.usage.restored_tokens == 0
    _, restored, _ = await ask(tmp_path / "other", **kept)
    assert restored == [0, 0, 0]


async def test_folders_that_cannot_be_one_are_refused(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    refused = {"file": "cannot be made", "open": "only this user can write"}
    for name, said in refused.items():
        with pytest.raises(InvalidParameter, match=f"kv_cache_dir: .*{said}"):
            await AsyncEngine.from_pretrained(checkpoint("llama"), **SETTINGS, kv_cache_dir=tmp_path / name)
    with pytest.raises(InvalidParameter, match="needs prefix_caching"):
        await AsyncEngine.from_pretrained(
            checkpoint("llama"), **SETTINGS, kv_cache_dir=tmp_path / "kv", prefix_caching=False
        )
