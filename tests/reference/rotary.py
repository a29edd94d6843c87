"""Rotary embedding."""

import torch
from torch import Tensor

from tests.reference.threads import single_threaded


def rotary_cos_sin(inv_freq: Tensor, num_positions: int) -> Tensor:
    """float32 [P, R]: cos then sin of position * inv_freq, the angle in float64."""
    angle = torch.arange(num_positions, dtype=torch.float64)[:, None] * inv_freq.double()
    return torch.cat([angle.cos(), angle.sin()], -1).float()


@single_threaded
def rotary_embedding_(
    q: Tensor,
    k: Tensor | None,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor | None]:
    """(q, k) afterwards. The first R features of each head are turned in pairs."""
    rows = cos_sin[positions].to(dtype)
    cos, sin = rows.unsqueeze(1).chunk(2, -1)  # [T, 1, R/2]

    def turn(x: Tensor) -> Tensor:
        x = x.to(dtype, copy=True)
        first, second = rotary_pairs(x, cos_sin.shape[1], interleaved)
        turned = first * cos - second * sin, first * sin + second * cos
        first.copy_(turned[0])
        second.copy_(turned[1])
        return x

    return turn(q), None if k is None else turn(k)


def rotary_pairs(x: Tensor, rotary_dim: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Views of the two members of every pair: (i, i + R/2), or interleaved (2i, 2i + 1)."""
    rotated = x[..., :rotary_dim]
    if interleaved:
        return rotated[..., 0::2], rotated[..., 1::2]
    return rotated[..., : rotary_dim // 2], rotated[..., rotary_dim // 2 :]
