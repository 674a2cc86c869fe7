"""Sampling on a GPU against sampling on the CPU, for real vocabularies; its kernels in graphs and at their limits."""

from __future__ import annotations

import pytest
import torch
from gpu.engines import DEVICE, SEED, captured, sampling
from support.device_sampling import by_cpu, by_kernels, device_sampler, rows_of

from asyncengine.execution.sampling.logprobs import token_logprobs
from asyncengine.execution.sampling.masks import FilledMasks
from asyncengine.execution.sampling.sampler import Sampled, Sampler
from asyncengine.request_spec import RequestSpec
from asyncengine.step import Row

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
VOCAB = 151_936
ROWS = 64
STEPS = 3
MOST_SWAPPED = 0.02
"""Largest share of drawn tokens that differ. Where two are drawn with nearly the same luck, or one lies on the edge of
what top-p keeps, rounding decides; of greedy ones there are none."""
_TOLERANCE = 1e-4
KINDS = sampling("sampled")


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_samples_as_the_cpu(kind: str) -> None:
    """The same logits, parameters and random numbers: a few steps of `ROWS` rows, each after the first with a token
    that only the device knows."""
    device = torch.device(DEVICE)
    generator = torch.Generator().manual_seed(SEED + [*KINDS].index(kind))
    cpu = torch.device("cpu")
    samplers = [(Sampler(ROWS, VOCAB, where), where) for where in (device, cpu)]
    last = torch.zeros(ROWS, dtype=torch.int64)
    requests = _requests(kind, generator)
    swapped = 0
    with torch.inference_mode():
        for step in range(STEPS):
            logits = 3 * torch.randn((ROWS, VOCAB), generator=generator)
            if "penalt" in kind or "each" in kind:  # what was seen already is likeliest
                for row_of_logits, (_, tokens) in zip(logits, requests, strict=True):
                    row_of_logits[tokens] += 12.0
            if kind == "min_tokens":  # the likeliest token would end the output
                logits[:, 2] = 40.0
            masks = _masks(kind, generator)
            rows = [_row(spec, tokens, slot, step) for slot, (spec, tokens) in enumerate(requests)]
            found, wanted = (
                sampler.sample(rows, logits.to(where), masks, last.to(where)) for sampler, where in samplers
            )
            swapped += _compare(found, wanted)
            last = wanted.tokens.cpu()
            for (_, tokens), token in zip(requests, last.tolist(), strict=True):
                tokens.append(token)
    drawn = KINDS[kind].temperature > 0 or kind.startswith("each")
    assert swapped <= (MOST_SWAPPED * ROWS * STEPS if drawn else 0)


def test_log_probabilities_are_the_cpus() -> None:
    device, generator = torch.device(DEVICE), torch.Generator().manual_seed(SEED)
    logits = 3 * torch.randn((ROWS, VOCAB), generator=generator)
    tokens = torch.randint(VOCAB, (ROWS,), generator=generator)
    found = token_logprobs(logits.to(device), tokens.to(device), 5)
    wanted = token_logprobs(logits, tokens, 5)
    torch.testing.assert_close(found.logprobs.cpu(), wanted.logprobs, atol=_TOLERANCE, rtol=0)
    torch.testing.assert_close(found.top.cpu(), wanted.top, atol=_TOLERANCE, rtol=0)
    assert torch.equal(found.top_ids.cpu(), wanted.top_ids)


def _requests(kind: str, generator: torch.Generator) -> list[tuple[RequestSpec, list[int]]]:
    """Parameters and prompt of each row."""
    made = []
    others = [params for name, params in KINDS.items() if not name.startswith(("masks", "each"))]
    for slot in range(ROWS):
        params = others[slot % len(others)] if kind.startswith("each") else KINDS[kind]
        tokens = torch.randint(VOCAB, (6 + slot % 5,), generator=generator).tolist()
        spec = RequestSpec(slot + 1, tuple(tokens), params, len(tokens) + STEPS, seed=slot, stop_ids=(2,))
        made.append((spec, tokens))
    return made


def _row(spec: RequestSpec, tokens: list[int], slot: int, step: int) -> Row:
    """Row of the prompt, or of the token that the step before has sampled."""
    if step == 0:
        return Row(spec, slot, 0, len(tokens), list(tokens), False, [], True)
    return Row(spec, slot, len(tokens) - 1, 1, tokens[:-1], True, [], True)


def _masks(kind: str, generator: torch.Generator) -> FilledMasks:
    """Random ones that allow half of all tokens; of every third row, or of all."""
    if not kind.startswith("masks"):
        return FilledMasks.none()
    places = list(range(0, ROWS, 3 if "some" in kind else 1))
    words = torch.randint(-(2**31), 2**31, (len(places), -(-VOCAB // 32)), generator=generator)
    packed = words.to(torch.int32)
    return FilledMasks(places, packed, {}, [])


def _compare(found: Sampled, wanted: Sampled) -> int:
    """The number of tokens that differ. Raises `AssertionError` if the logits they were chosen from do."""
    torch.testing.assert_close(found.best.float().cpu(), wanted.best.float(), atol=_TOLERANCE, rtol=_TOLERANCE)
    return int((found.tokens.cpu() != wanted.tokens).sum())


def flat_logits(rows: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(rows)
    return torch.randn((rows, VOCAB), device="cuda").to(dtype)


def test_the_same_in_a_graph_again_and_again_and_in_any_company() -> None:
    rows = rows_of(64)
    logits = flat_logits(64, torch.bfloat16)
    sampler = device_sampler(rows, VOCAB, logits.device)
    wanted, _ = by_kernels(sampler, rows, logits)
    slots, positions = torch.arange(64, device="cuda"), torch.arange(2, 66, device="cuda")
    tokens, best = torch.zeros(64, dtype=torch.int64, device="cuda"), torch.zeros(64, device="cuda")
    graph, _ = captured(lambda: sampler.sample(logits, slots, positions, tokens, best))
    for _ in range(5):
        tokens.fill_(-1)
        graph.replay()
        assert tokens.tolist() == wanted.tolist()
    alone = [by_kernels(sampler, [row], logits[row.slot : row.slot + 1])[0].item() for row in rows]
    assert alone == wanted.tolist()


def test_rows_that_no_bracket_helps() -> None:
    """More candidates than there is room for: nearly all logits the same, or a top-k of half the vocabulary."""
    rows = rows_of(6, [{"top_k": 80_000}, {"top_p": 0.5}, {"top_k": 80_000, "top_p": 0.5}])
    logits = (flat_logits(6, torch.float32) * 3).round() / 3
    tokens, _ = by_kernels(device_sampler(rows, VOCAB, logits.device), rows, logits)
    assert tokens.tolist() == by_cpu(rows, logits)[0].tolist()
