"""Families that are written down against transformers' own modules: logits, greedy tokens, and errors of bfloat16."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from support.checkpoints import Checkpoint
from support.drive import Driver, Job, prompts
from support.tiny_models import FAMILIES, VOCAB, WHOLE, WINDOW, make_model
from support.tiny_models import _common as common

from asyncengine.config import EngineConfig
from asyncengine.kernels.cpu import compiler_missing
from asyncengine.layers.kernels import layer_kernels
from asyncengine.layers.options import LayerOptions
from asyncengine.layers.step import StepContext
from asyncengine.models.decoder import Decoder
from asyncengine.models.families import decoder_config_of
from asyncengine.models.loading import load_model
from asyncengine.runner.building import build_runner
from asyncengine.sampling_params import SamplingParams

CPU = torch.device("cpu")
WANT = 64
LENGTHS = [40, 9, 23]
PAGE = 4
SCORED = SamplingParams(temperature=0.0, ignore_eos=True, prompt_logprobs=True)


def changed(name: str, **fields: Any) -> Callable[[], Any]:
    """The tiny model of that family with other options."""

    def make() -> Any:
        config = FAMILIES[name]()
        return type(config)(**{**config.to_dict(), **fields})

    return make


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **fields}


EACH = [1.0, 1.1, 1.3, 1.7, 2.0, 2.5]
LONG = {"short_factor": EACH, "long_factor": [3 * factor for factor in EACH]}
HALF, ALL = (rope("default", partial_rotary_factor=part) for part in (0.5, 1.0))
FULL = ["full_attention"] * 3
VARIANTS: dict[str, Callable[[], Any]] = {
    "llama with biases": changed("llama", attention_bias=True, mlp_bias=True),
    "llama, gelu": changed("llama", hidden_act="gelu"),
    "llama, squared relu": changed("llama", hidden_act="relu2", tie_word_embeddings=True),
    "llama, linear": changed("llama", rope_parameters=rope("linear", factor=4.0)),
    "llama, dynamic": changed("llama", rope_parameters=rope("dynamic", factor=4.0)),
    "llama, yarn": changed(
        "llama", rope_parameters=rope("yarn", factor=8.0, original_max_position_embeddings=64, beta_fast=4.0)
    ),
    "phi3, partial": changed(
        "phi3", hidden_size=WHOLE, sliding_window=None, tie_word_embeddings=True, rope_parameters=HALF
    ),
    "phi3, longrope": changed(
        "phi3", rope_parameters=rope("longrope", **LONG), original_max_position_embeddings=32, sliding_window=None
    ),
    "phi3, longrope within": changed(
        "phi3", rope_parameters=rope("longrope", **LONG), original_max_position_embeddings=256
    ),
    "granite with biases": changed("granite", attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "granite, uneven": changed("granite", embedding_multiplier=1.003, residual_multiplier=0.22, logits_scaling=3.7),
    "granitehybrid without positions": changed("granitehybrid", position_embedding_type=None),
    "olmo with biases": changed("olmo", attention_bias=True, clip_qkv=None, tie_word_embeddings=True),
    "olmo2 with biases": changed("olmo2", attention_bias=True),
    "olmo3, yarn": changed(
        "olmo3",
        rope_parameters={
            "full_attention": rope("yarn", factor=8.0, original_max_position_embeddings=32, attention_factor=1.2),
            "sliding_attention": rope("default"),
        },
    ),
    "smollm3 with windows": changed(
        "smollm3", use_sliding_window=True, sliding_window=WINDOW, layer_types=None, attention_bias=True, mlp_bias=True
    ),
    "stablelm, parallel": changed("stablelm", use_parallel_residual=True, use_qkv_bias=True),
    "stablelm, norms of heads": changed("stablelm", qk_layernorm=True, rope_parameters=ALL),
    "stablelm, partial norms": changed("stablelm", qk_layernorm=True, tie_word_embeddings=True),
    "glm4 without biases": changed("glm4", attention_bias=False, tie_word_embeddings=True),
    "glm, all rotated": changed("glm", rope_parameters=ALL),
    "exaone4 without windows": changed("exaone4", sliding_window=None, layer_types=FULL, tie_word_embeddings=True),
    "starcoder2 without biases": changed("starcoder2", use_bias=False, sliding_window=None, hidden_act="relu"),
    "hunyuan, alpha": changed("hunyuan", attention_bias=True, rope_parameters=rope("dynamic", alpha=50.0, factor=1.0)),
    "seedoss with biases": changed("seedoss", attention_bias=False, attention_out_bias=True, mlp_bias=True),
    "ministral3 with a window": changed("ministral3", sliding_window=WINDOW),
    "qwen2moe, every second layer": changed(
        "qwen2moe", mlp_only_layers=[], decoder_sparse_step=2, norm_topk_prob=True, qkv_bias=False,
        use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2, layer_types=None,
    ),
    "qwen3moe, not normalised": changed(
        "qwen3moe", norm_topk_prob=False, mlp_only_layers=[0], use_sliding_window=True, sliding_window=WINDOW
    ),
    "mixtral with a window": changed("mixtral", hidden_size=WHOLE, sliding_window=WINDOW),
    "olmoe, normalised": changed("olmoe", norm_topk_prob=True, attention_bias=True, num_key_value_heads=4),
    "granitemoe alone": lambda: hf.GraniteMoeConfig(
        **common(num_local_experts=4, num_experts_per_tok=3, tie_word_embeddings=True, attention_multiplier=0.3)
    ),
    "granitehybrid, experts": changed("granitehybrid", num_local_experts=4, num_experts_per_tok=2),
    "phimoe, longrope within": changed(
        "phimoe", max_position_embeddings=512, original_max_position_embeddings=256,
        rope_parameters=rope("longrope", **LONG, short_mscale=1.2, long_mscale=1.4,
                             original_max_position_embeddings=256),
    ),
    "glm4moe, one group": changed(
        "glm4moe", n_group=1, topk_group=1, norm_topk_prob=False, use_qk_norm=False, first_k_dense_replace=0
    ),
    "ernie4.5moe, none shared": changed(
        "ernie4.5moe", moe_num_shared_experts=0, moe_layer_interval=2, moe_layer_start_index=0, use_bias=False
    ),
    "llama4, two experts": changed(
        "llama4", num_experts_per_tok=2, use_qk_norm=False, attn_temperature_tuning=False, attention_bias=True,
        attention_chunk_size=50, no_rope_layers=[1, 1, 0, 1], layer_types=None,
    ),
    "gpt-oss, yarn": changed("gpt-oss", rope_parameters=None, hidden_size=48, attention_bias=False),
}  # fmt: skip
"""Options that change the forward: the families' own tiny models have some already. With longrope, transformers changes
the frequencies while a sequence grows, and leaves cached keys as they are; its forward over all tokens, as here, knows
one set, as the decoder does."""
OWN = (
    "llama", "phi3", "granite", "granitehybrid", "olmo", "olmo2", "olmo3", "smollm3", "stablelm", "glm", "glm4",
    "exaone4", "starcoder2", "hunyuan", "seedoss", "ministral3", "qwen2moe", "qwen3moe", "mixtral", "olmoe",
    "granitemoe", "phimoe", "glm4moe", "dots1", "ernie4.5moe", "minimax-m2", "gemma4moe", "gpt-oss", "llama4",
)  # fmt: skip
LIMITED = {"phi3, longrope within": 256, "phimoe, longrope within": 256}
"""Longest sequences, where a checkpoint could do more."""


@pytest.fixture(autouse=True)
def variants(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, make in VARIANTS.items():
        monkeypatch.setitem(FAMILIES, name, make)


class Recording:
    """A model whose logits are kept."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.logits: list[torch.Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, ids: torch.Tensor, step: StepContext, rows: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.forward(ids, step, rows)
        self.logits.append(logits.float().clone())
        return logits


def open_model(
    name: str, checkpoint: Checkpoint, seed: int = 0, dtype: str = "float32", **fields: Any
) -> tuple[Any, EngineConfig]:
    """The family's decoder, from a file of that type: norms keep theirs in float32."""
    config = EngineConfig(
        page_size=PAGE, max_num_seqs=64, kv_cache_memory="4MiB", dtype=dtype, show_progress=False,
        max_model_len=LIMITED.get(name), num_threads=1, **fields,
    )  # fmt: skip
    kind = getattr(torch, dtype)
    loaded = load_model(str(checkpoint(name, seed=seed, heavy=True, dtype=kind)), config)
    assert isinstance(loaded.model, Decoder)
    loaded.model = Recording(loaded.model)  # type: ignore[assignment]
    return loaded, config


def open_runner(name: str, checkpoint: Checkpoint, *args: Any, **fields: Any) -> tuple[Any, Recording]:
    loaded, config = open_model(name, checkpoint, *args, **fields)
    return build_runner(loaded, config), loaded.model


@torch.inference_mode()
def logits_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' own, [tokens, vocabulary]."""
    model.set_attn_implementation("eager")
    found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
    return found


def from_cache(driver: Driver, leader: Job, job: Job, pages: int) -> None:
    """`job` shares the first pages of `leader`, whose tokens it begins with."""
    driver.admit(job)
    job.pages, job.computed = leader.pages[:pages], pages * PAGE


@pytest.mark.parametrize("name", [*OWN, *VARIANTS])
def test_equals_transformers_in_float32(name: str, checkpoint: Checkpoint) -> None:
    """Logits of prompts and of what is generated; a token is transformers' greedy one if it has the largest of its
    logits after the same tokens. Then the same tokens in every batch, chunk and after preemption."""
    runner, recording = open_runner(name, checkpoint)
    model = make_model(name, heavy=True)
    driver = Driver(runner)
    texts, expected = prompts(LENGTHS, VOCAB), []
    for text in texts:
        recording.logits.clear()
        job = driver.job(text, WANT, SCORED)
        (output,) = driver.run([job])
        wanted = logits_of(model, [*text, *output[:-1]])
        found = torch.cat(recording.logits)
        assert found.shape == wanted.shape
        assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
        assert output == wanted[len(text) - 1 :].argmax(-1).tolist()
        expected.append(output)
    assert len({token for output in expected for token in output}) > 4

    def jobs() -> list[Job]:
        return [driver.job(text, WANT) for text in texts]

    for chunk in (None, 1, 7, 16):
        assert driver.run(jobs(), chunk) == expected, f"chunk {chunk}"
    assert driver.run(jobs(), 16, preempt_every=9) == expected
    runner.close()


@pytest.mark.parametrize("name", OWN)
def test_prefix_from_the_cache(name: str, checkpoint: Checkpoint) -> None:
    """Keys and values that another request has computed are as good as a request's own."""
    runner, _ = open_runner(name, checkpoint)
    driver = Driver(runner)
    (text,) = prompts([40], VOCAB)
    leader, alone = driver.job(text, 4), driver.job([*text[:30], *text[:5]], 12)
    driver.admit(alone)
    while not alone.done:
        driver.advance([alone])
    driver.admit(leader)
    driver.advance([leader])
    follower = driver.job([*text[:30], *text[:5]], 12)
    from_cache(driver, leader, follower, 7)
    while not follower.done:
        driver.advance([follower, *([] if leader.done else [leader])])
    assert follower.output == alone.output
    runner.close()


@pytest.mark.parametrize("name", [*OWN, "phi3, partial", "stablelm, norms of heads"])
def test_attention_in_steps_of_its_own_equals_transformers(name: str, checkpoint: Checkpoint) -> None:
    """Norms of heads, rotation, writing and attending one after the other, as on GPUs and without a compiler."""
    runner, recording = open_runner(name, checkpoint, attention_backend="torch")
    driver, (text,) = Driver(runner), prompts([40], VOCAB)
    driver.run([driver.job(text, 1, SCORED)])
    wanted = logits_of(make_model(name, heavy=True), text)
    assert float((recording.logits[-1] - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    runner.close()


COMMONEST = (
    "llama", "phi3", "granite", "granitehybrid", "smollm3", "seedoss", "ministral3", "qwen3moe", "mixtral", "gpt-oss",
    "granitemoe", "glm4moe", "dots1",
)  # fmt: skip
"""Families with an RMS norm before each branch, a gated feed-forward part or experts, and nothing after."""
SEEDS = (0, 1, 2)


@pytest.mark.parametrize("name", [*OWN, "granite, uneven"])
def test_bfloat16_is_as_near_to_float32_as_transformers(name: str, checkpoint: Checkpoint) -> None:
    """Greedy tokens cannot say, near ties go either way: the error of a token's logits, its median over tokens."""
    ours, theirs = [], []
    for seed in SEEDS:
        runner, recording = open_runner(name, checkpoint, seed, "bfloat16")
        driver = Driver(runner)
        model = make_model(name, seed, torch.bfloat16, heavy=True)
        texts = prompts([90, 70], VOCAB, seed + 5)
        for text in texts:
            recording.logits.clear()
            driver.run([driver.job(text, 1, SCORED)])
            rounded = logits_of(model, text)
            exact = logits_of(model.float(), text)
            model.to(torch.bfloat16)
            (found,) = recording.logits
            ours.append((found - exact).norm(dim=-1))
            theirs.append((rounded - exact).norm(dim=-1))
        runner.close()
    ratio = float(torch.cat(ours).median() / torch.cat(theirs).median())
    assert 0 < ratio <= 1.0, f"{ratio:.2f} times the error of transformers"


@pytest.mark.parametrize("name", ["phi3", "starcoder2", "stablelm, norms of heads", "qwen3.5"])
def test_adapters_on_everything_equal_peft(name: str, checkpoint: Checkpoint) -> None:
    """Matrices that the checkpoint keeps as one, those with biases, and those whose heads are normalised."""
    peft = pytest.importorskip("peft")
    from support.lora_driver import AdapterDriver
    from support.lora_reference import Reference, Weights

    from asyncengine.lora.layers.slots import install_lora

    loaded, config = open_model(name, checkpoint)
    lora = install_lora(loaded.model, 2, 4)
    base = make_model(name, heavy=True)
    table = base.get_input_embeddings()
    targets = [path for path, part in base.named_modules() if isinstance(part, torch.nn.Linear) or part is table]
    assert sorted(lora.modules) == sorted(targets)
    plain = logits_of(base, prompts([40], VOCAB)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tied weights
        wrapped = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets), "a")
    generator = torch.Generator().manual_seed(3)
    layers = [(path, part) for path, part in wrapped.base_model.model.named_modules() if hasattr(part, "lora_A")]
    factors = {path: Reference.draw(part, path, "a", part.base_layer is table, generator) for path, part in layers}
    lora.write(1, Weights(factors))
    runner = build_runner(loaded, config, lora=lora)
    driver = AdapterDriver(runner, lora)
    (text,) = prompts([40], VOCAB)
    for slot, wanted in ((1, logits_of(wrapped.base_model.model.eval(), text)), (0, plain)):
        loaded.model.logits.clear()
        driver.run([driver.with_adapter(text, slot, 1, SCORED)])
        (found,) = loaded.model.logits
        assert float((found - wanted).abs().max()) < 1e-5 * float(wanted.abs().max())
    assert float((wanted - logits_of(wrapped.base_model.model, text)).abs().max()) > 0.1
    runner.close()


def test_options_that_are_not_written_down_run_through_transformers(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said in one line, and never computed as if they were not there."""
    monkeypatch.setitem(FAMILIES, "olmoe, clipped", changed("olmoe", clip_qkv=1.0))
    monkeypatch.setitem(FAMILIES, "llama, quick gelu", changed("llama", hidden_act="quick_gelu"))
    for name, what in (("olmoe, clipped", "clip_qkv"), ("llama, quick gelu", "quick_gelu")):
        caplog.clear()
        config = EngineConfig(page_size=PAGE, max_num_seqs=64, kv_cache_memory="4MiB", show_progress=False)
        loaded = load_model(str(checkpoint(name)), config)
        assert not isinstance(loaded.model, Decoder)
        lines = [record.message for record in caplog.records if "through transformers" in record.message]
        assert [what in line for line in lines] == [True]


def test_code_from_a_folder_is_not_taken_for_transformers_own(checkpoint: Checkpoint) -> None:
    """Its configuration may call itself "phi3" and mean something else."""
    own = FAMILIES["phi3"]()
    assert decoder_config_of(own, 64) is not None
    other = type("Phi3Config", (type(own),), {"__module__": "folder.configuration_phi3"})
    assert decoder_config_of(other(), 64) is None


@pytest.mark.skipif(compiler_missing(torch.float32, CPU) is not None, reason="no compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*OWN, "stablelm, norms of heads"])
def test_what_compiled_kernels_take(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention with all before it in one call; and all layers of a short step in one."""
    from asyncengine.kernels.cpu import packed

    monkeypatch.setattr(packed, "packing_pays", lambda dtype: True)
    described = decoder_config_of(changed(name, hidden_size=64, intermediate_size=64)(), 64)
    assert described is not None
    decoder = Decoder(described, LayerOptions(dtype, CPU, layer_kernels("auto", dtype, CPU)), 64)
    rotates_exactly = name in ("olmo2", "olmo3") and dtype != torch.float32
    merged = name not in ("glm", "glm4", "hunyuan", "ernie4.5moe") and not rotates_exactly
    expected = [False, True, False, False] if name == "llama4" else [merged] * 3  # what rotates, rotates pairs
    assert [layer.merged is not None for layer in decoder.layers] == expected
    assert (decoder.fused is not None) == (name in COMMONEST)
