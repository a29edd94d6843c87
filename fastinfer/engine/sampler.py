"""From logits to tokens: bias, bans and penalties where asked, then `fastinfer.ops.sample`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer import ops
from fastinfer.engine.buffers import DeviceClock, ResultBuffers
from fastinfer.engine.request import Request

_FP32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class SampledTokens:
    """One entry per row of logits.

    ``valid`` is False where the row had no distribution (NaN in it, or all -inf); ``logprobs`` maps
    token ids to log-probabilities, most likely first, or is None where none were asked for.
    """

    token_ids: list[int]
    valid: list[bool]
    logprobs: list[dict[int, float] | None]


class Sampler:
    """Chooses the next token of each request.

    Args:
        device: where the logits are.
        max_rows: at most so many requests at a time.
        eos_token_ids: end the model's texts.
        clock: is stopped when the tokens have arrived.
    """

    def __init__(
        self,
        device: torch.device,
        max_rows: int,
        eos_token_ids: Sequence[int] = (),
        clock: DeviceClock | None = None,
    ) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._clock = clock or DeviceClock(device)
        self._results = ResultBuffers(device, max_rows)

    @torch.inference_mode()
    def __call__(
        self, requests: Sequence[Request], logits: Tensor, options: Mapping[str, Tensor]
    ) -> SampledTokens:
        """Samples one token per request, as `SamplingParams` says.

        Args:
            requests: R of them; the tokens so far, and what is to be done to the logits.
            logits: [R, V], any float dtype; not changed.
            options: the arguments of `fastinfer.ops.sample`, each [R]; none of them: greedy.

        A row's random numbers are keyed by the request's seed and the position of the token in its
        sequence, so the token does not depend on the batch, on chunking, prefix hits or preemption.
        """
        rows = len(requests)
        if not rows:
            return SampledTokens([], [], [])
        plain = all(request.plain for request in requests)
        token_ids, valid = self._results.arrays(rows)
        adjusted = logits if plain else self._adjust(requests, logits)
        ops.sample(adjusted, **options, token_ids=token_ids, valid=valid)
        self._results.download()
        self._clock.stop()
        logprobs = _logprobs([] if plain else requests, logits, token_ids)
        token_ids, valid = self._results.arrays(rows, on_host=True)
        return SampledTokens(token_ids.tolist(), valid.tolist(), logprobs or [None] * rows)

    def _adjust(self, requests: Sequence[Request], logits: Tensor) -> Tensor:
        """The logits in fp32 after bias, bans and penalties; as they came if no row asks."""
        rows = [(row, request, request.params) for row, request in enumerate(requests)]
        biased = [(row, p.logit_bias) for row, _, p in rows if p.logit_bias]
        banned = [
            (row, self._eos_token_ids + tuple(p.stop_token_ids or ()))
            for row, request, p in rows
            if len(request.output_token_ids) < p.min_tokens
        ]
        penalised = [
            (row, request)
            for row, request, p in rows
            if (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0)
        ]
        if not (biased or banned or penalised):
            return logits
        logits = logits.to(torch.float32, copy=True)
        if biased:
            values = [value for _, bias in biased for value in bias.values()]
            logits[_index_pairs(biased, logits)] += logits.new_tensor(values)
        if banned:
            logits[_index_pairs(banned, logits)] = float("-inf")
        if penalised:
            _penalise(logits, *zip(*penalised, strict=True))
        return logits


def _penalise(logits: Tensor, rows: Sequence[int], requests: Sequence[Request]) -> None:
    """Repetition, frequency and presence penalties of the given rows of logits, in place."""

    def column(name: str) -> Tensor:
        return logits.new_tensor([[getattr(r.params, name)] for r in requests]).clamp_(
            max=_FP32.max
        )

    outputs = _index_pairs([(i, r.output_token_ids) for i, r in enumerate(requests)], logits)
    prompts = _index_pairs([(i, r.prompt_token_ids) for i, r in enumerate(requests)], logits)
    counts = logits.new_zeros(len(rows), logits.shape[1])
    counts.index_put_(outputs, logits.new_ones(()), accumulate=True)
    repeated = counts > 0
    presence = column("presence_penalty") * repeated
    repeated[prompts] = True
    z, penalty = logits[list(rows)], column("repetition_penalty")
    z = torch.where(repeated, torch.where(z > 0, z / penalty, z * penalty), z)
    logits[list(rows)] = z - column("frequency_penalty") * counts - presence


def _logprobs(
    requests: Sequence[Request], logits: Tensor, token_ids: Tensor
) -> list[dict[int, float] | None]:
    """For each row that asks: its top tokens and the chosen one, with log_softmax of the logits."""
    result: list[dict[int, float] | None] = [None] * len(requests)
    wanted = [r.params.logprobs for r in requests]
    counts = {row: count for row, count in enumerate(wanted) if count is not None}
    if not counts:
        return result
    index = torch.tensor(list(counts), device=logits.device)
    logprobs = logits[index].float().log_softmax(-1)
    ids = logprobs.topk(min(max(counts.values()), logprobs.shape[1]), dim=-1).indices
    chosen = token_ids[index].unsqueeze(1)
    # The chosen token comes last; where it is among the top ones, it keeps its place there.
    for i, (row, count) in enumerate(counts.items()):
        tokens = ids[i, :count].tolist() + chosen[i].tolist()
        result[row] = dict(zip(tokens, logprobs[i, tokens].tolist(), strict=True))
    return result


def _index_pairs(
    entries: Sequence[tuple[int, Collection[int]]], logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Indices (rows, columns) into logits, from pairs of a row and its columns."""
    rows = torch.tensor([row for row, _ in entries], device=logits.device)
    lengths = torch.tensor([len(columns) for _, columns in entries], device=logits.device)
    flat = list(itertools.chain.from_iterable(columns for _, columns in entries))
    columns = torch.tensor(flat, dtype=torch.int64, device=logits.device)
    return rows.repeat_interleave(lengths), columns
