"""TRL's trainers with an engine in vLLM's place, and the parts of the adapter that need no TRL."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from support.data import cases_of
from support.tiny_models import make_model

from asyncengine import DEMO_MODEL, ContextLengthExceeded, Engine, SamplingParams
from asyncengine.errors import InvalidParameter
from asyncengine.integrations.trl import EngineGeneration, attach, checkpoint_name, named_weights, rollout

ROWS: dict[str, Any] = cases_of(__file__)

EOS = [2, 0]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.from_pretrained("demo", dtype="float32", show_progress=False) as loaded:
        yield loaded


@pytest.fixture
def model(engine: Engine) -> Iterator[Any]:
    """The demo model in transformers; afterwards the engine has its first weights again."""
    yield hf.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    engine.update_weights(DEMO_MODEL)


def a_trainer(model: Any, **changed: Any) -> Any:
    """A stand-in with what the adapter reads of a trainer, as GRPOTrainer has it."""
    args = SimpleNamespace(generation_kwargs=None, vllm_structured_outputs_regex=None)
    tokenizer = hf.AutoTokenizer.from_pretrained(DEMO_MODEL)
    fields = {
        "model": model, "args": args, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None,
        "repetition_penalty": 1.0, "max_completion_length": 12, "eos_token_ids": EOS,
        "state": SimpleNamespace(global_step=0),
        "_tokenize_prompts": lambda prompts: (tokenizer(prompts)["input_ids"], None, {}),
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changed})


def move(model: Any, seed: int = 1) -> None:
    """Change all that is trained, as an optimizer's step would."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))


def scores(model: Any, prompt: list[int], completion: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the completion as TRL computes them: of logits divided by the temperature."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]


def assert_scored(model: Any, generated: Any, temperature: float = 1.0) -> None:
    """The log-probabilities are those of `model`."""
    for prompt, completion, row in zip(*generated[:3], strict=True):
        found = torch.tensor([score for (score,) in row])
        torch.testing.assert_close(found, scores(model, prompt, completion, temperature), atol=2e-4, rtol=1e-4)


# ---------------------------------------------------------------- names

NAMES = ROWS["names"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_wrapped_parameters(name: str) -> None:
    assert checkpoint_name(name) == NAMES[name]


def test_names_of_another_tuner_and_adapter() -> None:
    assert checkpoint_name("base_model.model.q.vera_lambda_b.x", tuner="vera_lambda_") is None
    assert checkpoint_name("lm_head.modules_to_save.mine.weight", adapter="mine") == "lm_head.weight"


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "qwen3moe", "mixtral", "glm4moe", "gpt-oss", "nemotron-h", "gemma4"]
)
def test_weights_are_those_of_a_saved_checkpoint(name: str, tmp_path: Path) -> None:
    """transformers fuses experts and renames modules while it loads; a checkpoint has buffers, too."""
    made = make_model(name)
    made.save_pretrained(tmp_path)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    wrapped = torch.nn.Sequential()
    wrapped.add_module("module", model)
    saved = hf.modeling_utils.load_state_dict(str(tmp_path / "model.safetensors"))
    found = named_weights(wrapped)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    assert found.keys() - tied == saved.keys()
    for key, tensor in saved.items():
        torch.testing.assert_close(found[key], tensor, atol=0, rtol=0)


def test_weights_that_fsdp_shards_are_whole(tmp_path: Path) -> None:
    """One process is a world, too: its parameters are distributed tensors, which the engine refuses."""
    distributed = pytest.importorskip("torch.distributed")
    from torch.distributed.fsdp import fully_shard

    model = make_model("llama")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        found = named_weights(fully_shard(model, mesh=mesh))
        assert any(type(tensor) is not torch.Tensor for tensor in model.state_dict().values())
        assert all(type(tensor) is torch.Tensor for tensor in found.values())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    finally:
        distributed.destroy_process_group()


# ---------------------------------------------------------------- completions


def test_completions_are_scored_as_the_trainer_scores_them(engine: Engine, model: Any) -> None:
    """Each has its own draw, ends with the id that ends it, and has log-probabilities of the sampled distribution."""
    trainer = a_trainer(model, temperature=0.7, max_completion_length=24)
    generation = EngineGeneration(engine, trainer)
    generation.sync_weights()
    prompt = engine.tokenize([{"role": "user", "content": "Tell me a story about a cat named Lio."}])
    question = engine.tokenize([{"role": "user", "content": "What is the capital of Norway?"}])
    torch.manual_seed(3)
    generated = generation.generate([prompt] * 4 + [question] * 2, None, 4)
    prompts, completions, _, ids = generated
    assert prompts == [prompt] * 4 + [question] * 2
    assert len({tuple(each) for each in completions[:4]}) > 1
    assert all(len(each) == 24 for each in completions[:4])
    assert all(each[-1] in EOS and not set(each[:-1]) & set(EOS) for each in completions[4:])
    assert ids == [[[token] for token in each] for each in completions]
    assert_scored(model, generated, 0.7)
    torch.manual_seed(3)
    assert generation.generate([prompt] * 4 + [question] * 2, None, 4)[1] == completions


def test_the_trainer_says_what_ends_a_completion(engine: Engine, model: Any) -> None:
    """The checkpoint does not: ids that the trainer does not know as ends do not end."""
    question = engine.tokenize([{"role": "user", "content": "What is the capital of Norway?"}])
    dot = engine.tokenize(".", add_special_tokens=False)[-1]
    [ended] = EngineGeneration(engine, a_trainer(model, eos_token_ids=[dot], max_completion_length=40)).generate(
        [question]
    )[1]
    assert ended[-1] == dot
    [through] = EngineGeneration(engine, a_trainer(model, eos_token_ids=[2047], max_completion_length=40)).generate(
        [question]
    )[1]
    assert len(through) == 40
    assert set(EOS) & set(through)


def test_a_trainer_of_an_older_trl_has_one_end(engine: Engine, model: Any) -> None:
    trainer = a_trainer(model, _tokenizer=SimpleNamespace(eos_token_id=EOS[0]), max_completion_length=40)
    del trainer.eos_token_ids
    question = engine.tokenize([{"role": "user", "content": "What is the capital of Norway?"}])
    assert EngineGeneration(engine, trainer).generate([question])[1][0][-1] == EOS[0]


def test_generation_kwargs_are_sampling_parameters(engine: Engine, model: Any) -> None:
    def trained_with(**given: Any) -> EngineGeneration:
        args = SimpleNamespace(generation_kwargs=given, vllm_structured_outputs_regex=None)
        return EngineGeneration(engine, a_trainer(model, args=args))

    prompt = engine.tokenize("Once upon a time")
    assert len(trained_with(max_tokens=3, ignore_eos=True, stop_token_ids=()).generate([prompt])[1][0]) == 3
    [ids] = trained_with(structured_outputs={"regex": "[0-9]{5}"}, max_tokens=30).generate([prompt])[1]
    assert engine.detokenize(ids).isdigit()
    [ids] = trained_with(structured_outputs={"json": {"type": "boolean"}, "regex": None}).generate([prompt])[1]
    assert engine.detokenize(ids) in ("true", "false")
    for given, field in (
        ({"n": 2}, "generation_kwargs['n']"),
        ({"seed": 1}, "generation_kwargs['seed']"),
        ({"max_token": 3}, "max_token"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "generation_kwargs['structured_outputs']"),
        ({"structured_outputs": "a"}, "generation_kwargs['structured_outputs']"),
    ):
        with pytest.raises(InvalidParameter) as caught:
            trained_with(**given).generate([prompt])
        assert caught.value.field == field


def test_a_regex_of_the_trainer_is_cut_like_any_completion(engine: Engine, model: Any) -> None:
    """Its scores stay finite: nothing is put in the place of a drawn token to finish in time."""
    args = SimpleNamespace(generation_kwargs=None, vllm_structured_outputs_regex="<answer>\n[a-z ]*\n</answer>")
    generation = EngineGeneration(engine, a_trainer(model, args=args, max_completion_length=8))
    _, [ids], [row], _ = generation.generate([engine.tokenize("Once upon a time")])
    assert engine.detokenize(ids).startswith("<answer>"[: len(engine.detokenize(ids))])
    assert all(score[0] > float("-inf") for score in row)


def test_wrong_calls(engine: Engine, model: Any) -> None:
    trainer = a_trainer(model, max_completion_length=3000, eos_token_ids=[])
    generation = EngineGeneration(engine, trainer)
    with pytest.raises(InvalidParameter, match="images: cannot be given"):
        generation.generate([[5, 6]], [["a picture"]])
    with pytest.raises(InvalidParameter, match="engine: must be an Engine"):
        attach(a_trainer(model), "demo")  # type: ignore[arg-type]
    too_long = [5] * (engine.info.max_model_len + 1)
    with pytest.raises(ContextLengthExceeded):
        generation.generate([[5, 6], too_long])
    trainer.max_completion_length = 3
    assert generation.generate([[5, 6]], [None])[0] == [[5, 6]]
    assert not any(engine.stats().requests.values())  # the first of the two was aborted
    assert generation.llm.llm_engine.model_config.max_model_len == engine.info.max_model_len
    assert generation.generate([]) == ([], [], [], [])


# ---------------------------------------------------------------- weights


def test_a_rollout_pushes_weights_when_the_step_moves(engine: Engine, model: Any) -> None:
    trainer = a_trainer(model)
    sample = rollout(engine)
    for step in (0, 0, 1):
        trainer.state.global_step = step
        if step:
            move(model)
        made = sample(["Once upon a time", "Hello"], trainer)
        assert made.keys() == {"prompt_ids", "completion_ids", "logprobs"}
        assert [len(row) for row in made["logprobs"]] == [len(row) for row in made["completion_ids"]]
        columns = [[[score] for score in row] for row in made["logprobs"]]
        assert_scored(model, (made["prompt_ids"], made["completion_ids"], columns))
    other = a_trainer(copy.deepcopy(model))
    move(other.model, seed=9)
    made = sample(["Once upon a time"], other)  # another trainer's first step, with the same number
    columns = [[[score] for score in row] for row in made["logprobs"]]
    assert_scored(other.model, (made["prompt_ids"], made["completion_ids"], columns))


peft_cases = {
    "served": ({"target_modules": "all-linear", "r": 4}, True),
    "DoRA": ({"target_modules": ["q_proj", "down_proj"], "r": 4, "use_dora": True}, True),
    "modules_to_save": ({"target_modules": ["q_proj"], "r": 4, "modules_to_save": ["norm"]}, False),
}


@pytest.mark.parametrize("case", peft_cases)
def test_peft_adapters(case: str, engine: Engine, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    """An adapter that the engine serves is pushed as one, on the trainer's own base. One that it does not serve is
    merged, and the base stays what it was, to the bit."""
    peft = pytest.importorskip("peft")
    keywords, served = peft_cases[case]
    move(model)  # so that the base is not what the engine was loaded with
    wrapped = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **keywords))
    base = {name: each.clone() for name, each in wrapped.named_parameters() if not each.requires_grad}
    generation = EngineGeneration(engine, a_trainer(wrapped))
    prompt = engine.tokenize("Once upon a time")
    for seed in (2, 3):
        move(wrapped, seed)
        generation.sync_weights()
        assert_scored(wrapped, generation.generate([prompt] * 2))
    assert [each.name for each in engine.adapters()] == (["trl-policy"] if served else [])
    assert ("merged into the weights" in caplog.text) is not served
    for name, tensor in base.items():
        assert torch.equal(wrapped.get_parameter(name), tensor), name
    if served:
        engine.unload_adapter("trl-policy")


# ---------------------------------------------------------------- TRL itself


def train(trainer_class: Any, config_class: Any, engine: Engine, folder: Path, **more: Any) -> Any:
    """A trainer of the demo model after two steps with the engine."""
    datasets = pytest.importorskip("datasets")
    prompts = [[{"role": "user", "content": f"Tell me a story about a {animal}."}] for animal in ("cat", "dog")]
    settings = {
        "output_dir": str(folder), "max_steps": 2, "per_device_train_batch_size": 4, "num_generations": 2,
        "max_completion_length": 8, "learning_rate": 1e-2, "logging_steps": 1, "use_cpu": True, "bf16": False,
        "report_to": "none", "save_strategy": "no", "disable_tqdm": True,
    }  # fmt: skip
    trainer = trainer_class(
        model=str(DEMO_MODEL), reward_funcs=lambda completions, **_: [len(set(c[0]["content"])) for c in completions],
        args=config_class(**settings), train_dataset=datasets.Dataset.from_dict({"prompt": prompts}), **more,
    )  # fmt: skip
    if "rollout_func" not in more:
        attach(trainer, engine)
    trainer.train()
    return trainer


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_grpo_in_vllms_place(engine: Engine, tmp_path: Path) -> None:
    """The second step was sampled from the weights that the first one made: the trainer's own metric of the difference
    stays at rounding's size, which it does not where weights are stale."""
    trl = pytest.importorskip("trl")
    trainer = train(trl.GRPOTrainer, trl.GRPOConfig, engine, tmp_path)
    differences = [entry["sampling/sampling_logp_difference/max"] for entry in trainer.state.log_history[:2]]
    assert max(differences) < 1e-3
    assert engine.generate([5], SamplingParams(max_tokens=1)).weight_version == 1


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_grpo_with_a_rollout_function(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    trainer = train(trl.GRPOTrainer, trl.GRPOConfig, engine, tmp_path, rollout_func=rollout(engine))
    assert trainer.state.log_history[1]["completions/mean_length"] > 1
    assert engine.generate([5], SamplingParams(max_tokens=1)).weight_version == 1


def test_weights_follow_the_model(engine: Engine, model: Any) -> None:
    trainer = a_trainer(model, state=SimpleNamespace(global_step=7))
    generation = EngineGeneration(engine, trainer)
    move(model)
    generation.sync_weights()
    prompt = engine.tokenize("Once upon a time")
    assert_scored(model, generation.generate([prompt] * 2))
    assert engine.generate(prompt, SamplingParams(max_tokens=1)).weight_version == 7
