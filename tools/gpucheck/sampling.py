"""Sampling on the device against sampling on the CPU: the same logits, the same parameters, the same random numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from asyncengine.execution.sampling.logprobs import token_logprobs
from asyncengine.execution.sampling.masks import FilledMasks
from asyncengine.execution.sampling.sampler import Sampled, Sampler
from asyncengine.request_spec import RequestSpec
from asyncengine.sampling_params import SamplingParams
from asyncengine.step import Row
from tools.gpucheck.greedy import GREEDY
from tools.gpucheck.report import CheckFailed
from tools.gpucheck.session import Session

VOCAB = 151_936
ROWS = 64
STEPS = 3
MOST_SWAPPED = 0.02
"""Largest share of drawn tokens that differ. Where two are drawn with nearly the same luck, or one lies on the edge of
what top-p keeps, rounding decides; of greedy ones there are none."""
_TOLERANCE = 1e-4
_DRAWN = GREEDY.replace(temperature=0.8)

KINDS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "temperature": _DRAWN,
    "top-k": _DRAWN.replace(top_k=20),
    "top-p": _DRAWN.replace(top_p=0.9),
    "top-k, top-p and min-p": _DRAWN.replace(temperature=0.6, top_k=20, top_p=0.95, min_p=0.02),
    "min-p": _DRAWN.replace(min_p=0.05),
    "repetition penalty": GREEDY.replace(repetition_penalty=1.3),
    "presence and frequency penalties": GREEDY.replace(presence_penalty=0.7, frequency_penalty=0.4),
    "bias": GREEDY.replace(logit_bias={77: 30.0}),
    "min_tokens": GREEDY.replace(min_tokens=STEPS),
    "masks": _DRAWN.replace(top_p=0.9),
    "masks of some rows": GREEDY,
    "each row something else": GREEDY,
}
Make = Callable[[torch.device], Sampler]


def run(session: Session) -> None:
    make = partial(Sampler, ROWS, VOCAB)
    for number, kind in enumerate(KINDS):
        seed = session.settings.seed + number
        session.check(kind, partial(check_kind, kind, session.device, seed, make, make))
    session.check("log-probabilities", partial(check_logprobs, session.device, session.settings.seed))


def check_kind(kind: str, device: torch.device, seed: int, tested: Make, reference: Make) -> str:
    """A few steps of `ROWS` rows, each after the first with a token that only the device knows.

    Raises `CheckFailed` for other tokens than the reference's, unless rounding may have chosen.
    """
    generator = torch.Generator().manual_seed(seed)
    cpu = torch.device("cpu")
    samplers = [(tested(device), device), (reference(cpu), cpu)]
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
            swapped += _compare(kind, step, found, wanted)
            last = wanted.tokens.cpu()
            for (_, tokens), token in zip(requests, last.tolist(), strict=True):
                tokens.append(token)
    if swapped > MOST_SWAPPED * ROWS * STEPS or (swapped and KINDS[kind].temperature == 0 and "each" not in kind):
        raise CheckFailed(f"{swapped} of {ROWS * STEPS} tokens are not those sampled on the CPU")
    return f"{ROWS * STEPS - swapped} of {ROWS * STEPS} tokens the same"


def check_logprobs(device: torch.device, seed: int) -> str:
    """Raises `CheckFailed` if they are off by more than float32 rounds."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn((ROWS, VOCAB), generator=generator)
    tokens = torch.randint(VOCAB, (ROWS,), generator=generator)
    found = token_logprobs(logits.to(device), tokens.to(device), 5)
    wanted = token_logprobs(logits, tokens, 5)
    error = max(float((found.own.cpu() - wanted.own).abs().max()), float((found.top.cpu() - wanted.top).abs().max()))
    if not error <= _TOLERANCE or not torch.equal(found.top_ids.cpu(), wanted.top_ids):
        raise CheckFailed(f"log-probabilities differ from the CPU's by {error:.3g}, or other tokens are likeliest")
    return f"largest error {error:.2g}"


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


def _compare(kind: str, step: int, found: Sampled, wanted: Sampled) -> int:
    """The number of tokens that differ. Raises `CheckFailed` if the logits they were chosen from do."""
    best, expected = found.best.float().cpu(), wanted.best.float()
    if not torch.allclose(best, expected, atol=_TOLERANCE, rtol=_TOLERANCE):
        error = float((best - expected).abs().max())
        raise CheckFailed(f"{kind}, step {step}: the largest logits differ from the CPU's by {error:.3g}")
    return int((found.tokens.cpu() != wanted.tokens).sum())
