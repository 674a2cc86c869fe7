"""The plan of a decoder's layers, of configurations alone."""

from __future__ import annotations

from dataclasses import replace

from support.tiny_models import FAMILIES

from asyncengine.execution.models.decoder import DecoderConfig
from asyncengine.execution.models.decoder_layer import plan_layers
from asyncengine.execution.models.families import decoder_config_of


def described(name: str) -> DecoderConfig:
    config = decoder_config_of(FAMILIES[name](), 64)
    assert config is not None
    return config


def test_layers_share_the_cache_of_the_layer_whose_keys_they_attend_to() -> None:
    config = described("gemma4")
    plan = plan_layers(config)
    attentions = [layer.attention for layer in config.layers]
    for index, attention in enumerate(attentions):
        if attention.keys_of is not None:
            assert plan.pools[index] == plan.pools[attention.keys_of]
    own = [pool for pool, attention in zip(plan.pools, attentions, strict=True) if attention.keys_of is None]
    assert own == [*range(len(own))]
    assert plan.last_kept == max(index for index, each in enumerate(attentions) if each.keys_of is None)


def test_layers_with_states_are_counted() -> None:
    config = described("qwen3next")
    plan = plan_layers(config)
    kept = [layer.state is not None for layer in config.layers]
    assert any(kept)
    assert list(plan.states) == [sum(kept[:index]) for index in range(len(kept))]
    unrotated = [layer.attention is None for layer in config.layers]
    assert [index == len(config.rotary) for index in plan.rotaries] == unrotated


def test_a_stage_has_a_part_and_hands_on_norms_of_layer_norms() -> None:
    config = described("llama")
    plan = plan_layers(config, range(1))
    assert (plan.run, plan.is_last, plan.carries_norms) == (range(1), False, False)
    assert plan_layers(config).is_last
    layer = replace(config, norm=replace(config.norm, kind="layer"))
    assert plan_layers(layer, range(1)).carries_norms
    assert not plan_layers(layer).carries_norms
