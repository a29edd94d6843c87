"""Sampling: one token id from each row of logits.

Errors are ValueError and name the op, the argument, what was expected and what came.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastinfer._library  # noqa: F401  (defines torch.ops.fastinfer)
from fastinfer.ops._common import check, check_devices, check_out, refuse_grad

_sample_out = torch.ops.fastinfer.sample.out


def sample(
    logits: Tensor,
    temperature: Tensor | None = None,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    token_ids: Tensor | None = None,
    valid: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token from every row, each with its own parameters.

    A row with temperature 0 (or with no temperatures at all) gives the lowest index among its
    largest logits. Any other row is drawn from softmax(x), x = logits / temperature, over the
    tokens that pass all three filters:

        top_k   x_i >= the k-th largest x (ties stay)
        top_p   the tokens with a strictly larger x hold less than top_p of the probability, which
                is taken over the survivors of top_k
        min_p   exp(x_i - max(x)) >= min_p

    by the Gumbel-max trick, so that no sum over the row decides:

        token = argmax over i of x_i + g_i,   g_i = -log(-log(u_i)),   u_i = (r_i + 1/2) / 2^32
        r_i   = word i % 4 of Philox4x32-10 with key (seed lo32, seed hi32) and
                counter (i / 4, position lo32, position hi32, 0)

    Ties go to the lowest index. The random numbers depend on nothing but (seed, position, i): a
    request that keeps its seed and counts its positions gets the same tokens in any batch.

    Precision on the CPU: scores are compared as (logit - max) / temperature + g in float64 from
    the logits as they are, so a float64 reference differs only where two scores agree to about
    1e-14. top_k is exact. The probabilities of top_p come from a float32 exponential summed in
    float64: a token whose larger ones hold top_p to within about 1e-6 may fall on either side.
    min_p is decided in float64. Results do not depend on the number of threads.

    Args:
        logits: [B, V], fp32, bf16 or fp16; any row stride, V >= 1.
        temperature: float32 [B], >= 0, or None: 0 for all.
        top_k: int32 [B]; <= 0 or >= V: off. None: off.
        top_p: float32 [B], > 0; >= 1: off. None: off.
        min_p: float32 [B], in [0, 1]; 0: off. None: off.
        seeds: int64 [B]; required where a temperature is above 0.
        positions: int64 [B], the index of the token that is drawn in its sequence, or any other
            counter; required where a temperature is above 0.
        token_ids: int64 [B], receives the tokens.
        valid: bool [B], receives the flags.

    Returns:
        (token_ids int64 [B], valid bool [B]). valid is False where the row holds a NaN or nothing
        above -inf; its token is the lowest index among the largest of the other logits, or 0.
        Where a logit is +inf, the first such token is taken. Every token is in [0, V).

    Raises:
        ValueError: shapes, dtypes or strides do not fit; on CPU also a parameter out of its range,
            or a temperature above 0 without seeds and positions.

    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011 (Philox); Maddison, Tarlow
    and Minka, "A* Sampling", 2014 (Gumbel-max); Fan, Lewis and Dauphin, "Hierarchical Neural Story
    Generation", 2018 (top-k); Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019
    (nucleus, top-p); Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent
    LLM Outputs", 2024.
    """
    refuse_grad("sample", logits=logits, temperature=temperature, top_p=top_p, min_p=min_p)
    if token_ids is None:
        token_ids = torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)
    if valid is None:
        valid = torch.empty(logits.shape[:1], dtype=torch.bool, device=logits.device)
    _sample_out(
        logits,
        temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seeds=seeds,
        positions=positions,
        token_ids=token_ids,
        valid=valid,
    )
    return token_ids, valid


def _check_sample(
    logits: Tensor, parameters: dict[str, tuple[Tensor | None, torch.dtype]]
) -> int | torch.SymInt:
    op = "sample"
    check(op, logits.dim() == 2, f"logits: expected 2 dimensions [B, V], got {tuple(logits.shape)}")
    check(op, logits.is_floating_point(), f"logits: expected a float tensor, got {logits.dtype}")
    check_devices(op, logits=logits, **{name: tensor for name, (tensor, _) in parameters.items()})
    rows = logits.shape[0]
    for name, (parameter, dtype) in parameters.items():
        if parameter is not None:
            check_out(op, name, parameter, (rows,), dtype)
    return rows


@torch.library.register_fake("fastinfer::sample")
def _(
    logits: Tensor,
    temperature: Tensor | None = None,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows = _check_sample(logits, _parameters(temperature, top_k, top_p, min_p, seeds, positions))
    return (
        logits.new_empty((rows,), dtype=torch.int64),
        logits.new_empty((rows,), dtype=torch.bool),
    )


@torch.library.register_fake("fastinfer::sample.out")
def _(
    logits: Tensor,
    temperature: Tensor | None = None,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    token_ids: Tensor,
    valid: Tensor,
) -> None:
    rows = _check_sample(logits, _parameters(temperature, top_k, top_p, min_p, seeds, positions))
    check_devices("sample", logits=logits, token_ids=token_ids, valid=valid)
    check_out("sample", "token_ids", token_ids, (rows,), torch.int64)
    check_out("sample", "valid", valid, (rows,), torch.bool)


def _parameters(
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
) -> dict[str, tuple[Tensor | None, torch.dtype]]:
    """Each per-row parameter with the dtype that it must have."""
    return {
        "temperature": (temperature, torch.float32),
        "top_k": (top_k, torch.int32),
        "top_p": (top_p, torch.float32),
        "min_p": (min_p, torch.float32),
        "seeds": (seeds, torch.int64),
        "positions": (positions, torch.int64),
    }
