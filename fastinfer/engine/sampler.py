"""From logits to tokens: bias, bans and penalties where asked, then `fastinfer.ops.sample`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastinfer import ops
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
    """Chooses the next token of each request; ``eos_token_ids`` end the model's texts."""

    def __init__(self, eos_token_ids: Sequence[int] = ()) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    @torch.inference_mode()
    def __call__(self, requests: Sequence[Request], logits: Tensor) -> SampledTokens:
        """Samples one token per request, as `SamplingParams` says.

        Args:
            requests: R of them; the row's parameters and the tokens so far.
            logits: [R, V], any float dtype; not changed.

        A row's random numbers are keyed by the request's seed and the position of the token in its
        sequence, so the token does not depend on the batch, on chunking, prefix hits or preemption.
        """
        device = logits.device
        params = [request.params for request in requests]
        options: dict[str, Tensor] = {}
        if any(p.temperature > 0 for p in params):
            for name in ("temperature", "top_p", "min_p"):
                values = [getattr(p, name) for p in params]
                options[name] = torch.tensor(values, dtype=torch.float32, device=device)
            # What fp32 rounds to infinity or to zero is still a temperature and a top_p.
            options["temperature"].clamp_(max=_FP32.max)
            options["top_p"].clamp_(min=_FP32.tiny)
            top_k = [min(max(p.top_k, 0), logits.shape[1]) for p in params]
            options["top_k"] = torch.tensor(top_k, dtype=torch.int32, device=device)
            options["seeds"] = torch.tensor([r.seed for r in requests], device=device)
            options["positions"] = torch.tensor([r.num_tokens for r in requests], device=device)
        token_ids, valid = ops.sample(self._adjust(requests, logits), **options)
        return SampledTokens(
            token_ids.tolist(), valid.tolist(), _logprobs(requests, logits, token_ids)
        )

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
