"""Sampling, with its random numbers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.threads import single_threaded

_WORD = 0xFFFFFFFF


def philox4x32(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 of counter [..., 4] and key [..., 2], 32-bit words held in int64.

    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A product of two words
    may pass 2^63, but int64 wraps and its low 64 bits, all that is used, stay right.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((right >> 32) & _WORD) ^ c1 ^ k0,
            right & _WORD,
            ((left >> 32) & _WORD) ^ c3 ^ k1,
            left & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)


def random_words(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """r_i for every row and token: int64 [B, vocab] in [0, 2^32)."""
    group = torch.arange(-(-vocab // 4))[None, :]
    seeds, positions = seeds.cpu()[:, None], positions.cpu()[:, None]
    counter = torch.stack(
        torch.broadcast_tensors(
            group, positions & _WORD, (positions >> 32) & _WORD, torch.zeros(1, 1, dtype=torch.long)
        ),
        -1,
    )
    key = torch.stack([seeds & _WORD, (seeds >> 32) & _WORD], -1)
    return philox4x32(counter, key).flatten(1)[:, :vocab]


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """-log(-log(u)) with u = (r + 0.5) / 2^32, float64 [B, vocab]."""
    uniform = (random_words(seeds, positions, vocab).double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log(uniform))


@dataclass(frozen=True)
class Sampled:
    """token_ids int64 [B], valid bool [B]; scores float64 [B, V]: -inf where a token is not kept,
    the perturbed logit otherwise (of a greedy row, the logit itself)."""

    token_ids: Tensor
    valid: Tensor
    scores: Tensor


def kept_tokens(x: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which tokens of one row x [V] (logits / temperature) stay candidates: bool [V]."""
    keep = torch.ones_like(x, dtype=torch.bool)
    if x.isposinf().any():
        return x.isposinf()
    if 0 < top_k < x.numel():
        keep = x >= x.sort(descending=True).values[top_k - 1]
    in_top_k = keep
    if top_p < 1:
        probs = torch.softmax(torch.where(in_top_k, x, -torch.inf), 0)
        order = x.sort(descending=True)
        mass = probs[order.indices].cumsum(0)
        # Mass of the strictly larger: that before the first of an equal run.
        first = torch.searchsorted(-order.values, -x)
        larger = torch.where(first > 0, mass[(first - 1).clamp(min=0)], 0.0)
        keep = keep & (larger < top_p)
    if min_p > 0:
        keep = keep & (torch.exp(x - x.max()) >= min_p)
    return keep


@single_threaded
def sample(
    logits: Tensor,
    temperature: Tensor | None = None,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> Sampled:
    """One token a row; see `Sampled`."""
    x = logits.double().cpu()
    batch, vocab = x.shape
    nan = x.isnan()
    valid = ~nan.any(-1) & (x > -torch.inf).any(-1)
    scores = x.masked_fill(nan, -torch.inf)
    warm = torch.zeros(batch) if temperature is None else temperature.double().cpu()
    drawn = ((warm > 0) & valid).nonzero().squeeze(-1).tolist()
    if drawn:
        assert seeds is not None and positions is not None
        noise = gumbel_noise(seeds[drawn], positions[drawn], vocab)
    for i, row in enumerate(drawn):
        scaled = x[row] / warm[row]
        keep = kept_tokens(
            scaled,
            0 if top_k is None else int(top_k[row]),
            1.0 if top_p is None else float(top_p[row]),
            0.0 if min_p is None else float(min_p[row]),
        )
        scores[row] = torch.where(keep, scaled + noise[i], -torch.inf)
    lowest = torch.arange(vocab).expand(batch, vocab)
    best = scores == scores.amax(-1, keepdim=True)
    token_ids = torch.where(best, lowest, vocab).amin(-1)
    return Sampled(token_ids.clamp(max=vocab - 1), valid, scores)
