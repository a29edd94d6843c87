"""Rotary position embedding and the table of cosines and sines that it reads.

Errors are ValueError and name the op, the argument, what was expected and what came.
"""

from __future__ import annotations

import torch
from torch import Tensor

import fastinfer._library  # noqa: F401  (defines torch.ops.fastinfer)
from fastinfer.ops._common import check, check_devices, refuse_grad

_rotary_embedding_ = torch.ops.fastinfer.rotary_embedding_.default


def rotary_embedding_(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    """Turn pairs of features of q and k by an angle that grows with the token's position, in place.

        (x1, x2) <- (x1 cos - x2 sin, x1 sin + x2 cos),   cos, sin = cos_sin[positions[t]]

    The first R features of every head form R/2 pairs: (x[i], x[i + R/2]) as in GPT-NeoX and Llama,
    or (x[2i], x[2i + 1]) if `interleaved`, as in GPT-J. The features from R on stay as they are
    (partial rotary). Half-precision results are computed in fp32 and rounded once; fp32 results are
    within one unit in the last place of hypot(x1, x2).

    Args:
        q: [T, H, D], fp32, bf16 or fp16; any strides with a dense last dimension, such as a view of
            a fused projection.
        k: [T, Hk, D], q's dtype, or None.
        positions: int64 [T]; rows of cos_sin.
        cos_sin: float32 [P, R], R even and at most D: R/2 cosines, then R/2 sines; see
            `rotary_cos_sin`.
        interleaved: how features are paired.

    Raises:
        ValueError: shapes, dtypes or strides do not fit; on CPU also a position outside [0, P),
            before anything is written.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    refuse_grad("rotary_embedding_", q=q, k=k, cos_sin=cos_sin)
    _rotary_embedding_(q, k, positions, cos_sin, interleaved=interleaved)


def rotary_cos_sin(
    inv_freq: Tensor, num_positions: int, device: torch.device | str | None = None
) -> Tensor:
    """The table `rotary_embedding_` reads.

        table[p] = [cos(p * inv_freq), sin(p * inv_freq)]

    The angle is the product of the position and the fp32 inverse frequency in float64; cosine and
    sine are taken in float64 and stored in fp32, so every entry is within half an ulp at any
    position. transformers computes the angle in fp32, whose spacing at angle a is about a * 1.2e-7:
    from about position 1e5 on its cosines and sines drift visibly from these.

    Args:
        inv_freq: [R/2], the inverse frequencies of the pairs, usually theta^(-2i/R).
        num_positions: P, the number of rows.
        device: where the table goes; default: inv_freq's device.

    Returns:
        float32 [P, R].
    """
    if inv_freq.dim() != 1 or not inv_freq.is_floating_point():
        raise ValueError(
            "fastinfer::rotary_cos_sin: inv_freq: expected a float tensor [R/2], got "
            f"{inv_freq.dtype} {tuple(inv_freq.shape)}"
        )
    if num_positions < 0:
        raise ValueError(
            f"fastinfer::rotary_cos_sin: num_positions: expected a number >= 0, got {num_positions}"
        )
    device = inv_freq.device if device is None else torch.device(device)
    # On the CPU, since not every accelerator has float64; in pieces, since the table may be large.
    frequencies = inv_freq.detach().cpu().float().double()
    table = torch.empty(num_positions, 2 * frequencies.numel(), dtype=torch.float32)
    positions = torch.arange(num_positions, dtype=torch.float64)[:, None]
    for first in range(0, num_positions, 65536):
        rows = slice(first, first + 65536)
        angle = positions[rows] * frequencies
        table[rows] = torch.cat([angle.cos(), angle.sin()], -1)
    return table.to(device)


@torch.library.register_fake("fastinfer::rotary_embedding_")
def _(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
) -> None:
    op = "rotary_embedding_"
    check_devices(op, q=q, k=k, positions=positions, cos_sin=cos_sin)
    check(op, q.dim() == 3, f"q: expected 3 dimensions [T, H, D], got {tuple(q.shape)}")
    check(op, q.is_floating_point(), f"q: expected a float tensor, got {q.dtype}")
    if k is not None:
        check(op, k.dim() == 3, f"k: expected 3 dimensions [T, Hk, D], got {tuple(k.shape)}")
        check(op, k.dtype == q.dtype, f"k: expected dtype {q.dtype} as q, got {k.dtype}")
        check(
            op,
            k.shape[0] == q.shape[0] and k.shape[2] == q.shape[2],
            f"k: expected {q.shape[0]} tokens and head size {q.shape[2]}, got {tuple(k.shape)}",
        )
    check(op, positions.dtype == torch.int64, f"positions: expected int64, got {positions.dtype}")
    check(op, positions.dim() == 1, f"positions: expected shape [T], got {tuple(positions.shape)}")
    check(op, positions.shape[0] == q.shape[0], f"positions: expected {q.shape[0]} elements")
    check(op, cos_sin.dtype == torch.float32, f"cos_sin: expected float32, got {cos_sin.dtype}")
    check(op, cos_sin.dim() == 2, f"cos_sin: expected shape [P, R], got {tuple(cos_sin.shape)}")
    check(
        op,
        cos_sin.shape[1] % 2 == 0 and cos_sin.shape[1] <= q.shape[2],
        f"cos_sin: expected an even number of columns up to {q.shape[2]}, got {cos_sin.shape[1]}",
    )
