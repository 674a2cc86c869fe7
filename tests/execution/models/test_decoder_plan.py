"""The plan of a decoder's layers, of configurations alone."""

from __future__ import annotations

from dataclasses import replace

from support.tiny_models import FAMILIES

from asyncengine.execution.layers.basic import Matrix
from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.decoder_layer import MTPConfig
from asyncengine.execution.models.decoder_plan import plan_decoder
from asyncengine.execution.models.families import decoder_config_of


def described(name: str) -> DecoderConfig:
    config = decoder_config_of(FAMILIES[name](), 64)
    assert config is not None
    return config


def test_layers_share_the_cache_of_the_layer_whose_keys_they_attend_to() -> None:
    config = described("gemma4")
    plan = plan_decoder(config)
    attentions = [layer.attention for layer in config.layers]
    for index, attention in enumerate(attentions):
        if attention.keys_of is not None:
            assert plan.pools[index] == plan.pools[attention.keys_of]
    own = [pool for pool, attention in zip(plan.pools, attentions, strict=True) if attention.keys_of is None]
    assert own == [*range(len(own))]
    assert plan.last_kept == max(index for index, each in enumerate(attentions) if each.keys_of is None)


def test_layers_with_states_are_counted() -> None:
    config = described("qwen3next")
    plan = plan_decoder(config)
    kept = [layer.state is not None for layer in config.layers]
    assert any(kept)
    assert list(plan.states) == [sum(kept[:index]) for index in range(len(kept))]
    unrotated = [layer.attention is None for layer in config.layers]
    assert [index == len(config.rotary) for index in plan.rotaries] == unrotated


def test_stages_hand_on_norms_of_layer_norms() -> None:
    config = described("llama")
    last, whole = len(config.layers) - 1, range(len(config.layers))
    first, end = range(1), range(1, len(config.layers))
    layer_norms = replace(config, norm=replace(config.norm, kind="layer"))
    expected = {
        # model, stage: (reads norms, hands them on, layers whose next norm is computed here, records)
        (config, None): (False, False, whole, True),
        (config, first): (False, False, range(0), True),
        (config, end): (False, False, end, True),
        (layer_norms, None): (False, False, whole, True),
        (layer_norms, first): (False, True, first, False),
        (layer_norms, end): (True, False, end, False),
    }
    for (model, stage), values in expected.items():
        plan = plan_decoder(model, stage)
        assert (plan.reads_norms, plan.hands_on_norms, plan.normed, plan.records) == values
        assert plan.is_last is (last in plan.run)


def test_only_compiled_kernels_of_one_process_are_recorded() -> None:
    config = described("llama")
    assert plan_decoder(config, kernels="compiled").records
    assert not plan_decoder(config, kernels="torch").records
    assert not plan_decoder(config, sharded=True).records


def test_matrices_go_between_widths_that_differ() -> None:
    config = described("llama")
    assert plan_decoder(config).projections == ()
    assert plan_decoder(replace(config, embedding_width=config.width)).projections == ()
    plan = plan_decoder(replace(config, width=64, embedding_width=16, project_in="in", project_out="out"))
    assert plan.projections == ((Matrix("in", 64), 16), (Matrix("out", 16), 64))


def test_a_head_reads_the_stream_where_it_taps_it() -> None:
    config = described("llama")
    assert plan_decoder(config).taps == ()
    head = MTPConfig(config.layers[:1], "mtp.", "t", "h", "p", "f", taps=(1, 2))
    assert plan_decoder(replace(config, mtp=head)).taps == (1, 2)
