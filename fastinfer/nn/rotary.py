"""`RotaryEmbedding`: rotary position embedding of queries and keys."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fastinfer import ops
from fastinfer.nn.norm import OP_DTYPES, wants_grad


class RotaryEmbedding(nn.Module):
    """Turns pairs of features of q and k by an angle that grows with the token's position.

        (x1, x2) <- (x1 cos - x2 sin, x1 sin + x2 cos),   cos, sin of position * inv_freq[i]
        inv_freq[i] = base^(-2i / dim)

    The first `dim` features of a head form the pairs (x[i], x[i + dim/2]), or (x[2i], x[2i + 1]) if
    `interleaved`; the others stay as they are.

    Args:
        dim: R, the features that are turned; even.
        max_positions: positions are below this.
        base: of the frequencies.
        interleaved: how features are paired.
        inv_freq: float [R/2], frequencies of any other kind; then `base` means nothing.
        attention_scaling: factor of cosines and sines (YaRN).
        device: where the table is.

    The table of cosines and sines is an fp32 buffer, no part of the state_dict, that casts of the
    module do not round; see `fastinfer.ops.rotary_cos_sin`. Gradients reach q and k.

    Raises:
        ValueError: an odd dim, or frequencies of another number.

    Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """

    cos_sin: Tensor

    def __init__(
        self,
        dim: int,
        max_positions: int = 8192,
        base: float = 10000.0,
        *,
        interleaved: bool = False,
        inv_freq: Tensor | None = None,
        attention_scaling: float = 1.0,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(f"RotaryEmbedding: dim: expected an even number >= 2, got {dim}")
        if inv_freq is None:
            inv_freq = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        if inv_freq.shape != (dim // 2,):
            raise ValueError(
                f"RotaryEmbedding: inv_freq: expected shape {(dim // 2,)}, "
                f"got {tuple(inv_freq.shape)}"
            )
        self.interleaved = interleaved
        table = ops.rotary_cos_sin(inv_freq, max_positions, device) * attention_scaling
        self.register_buffer("cos_sin", table, persistent=False)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """q and k turned, in fresh tensors of their shapes.

        Args:
            q: [..., H, D] with D >= R, such as [B, S, H, D] or [T, H, D].
            k: [..., Hk, D], the same tokens and dtype.
            positions: int64 [...], one for each token; or what broadcasts to them.

        Raises:
            ValueError: shapes or dtypes do not fit; on CPU also a position past the table.
        """
        tokens = positions.expand(q.shape[:-2]).flatten().contiguous()
        return rotate(q, k, tokens, self.cos_sin, interleaved=self.interleaved)

    def extra_repr(self) -> str:
        """What sets this module apart, for print()."""
        positions, dim = self.cos_sin.shape
        return f"dim={dim}, max_positions={positions}, interleaved={self.interleaved}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryEmbedding:
        # Angles rounded to half precision would turn distant tokens by anything.
        table = self.cos_sin
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.cos_sin.dtype != table.dtype:
            self.cos_sin = table.to(self.cos_sin.device)
        return self


def rotate(
    q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """q and k [..., heads, D] turned by the rows `positions` [T] of a table [P, R].

    By the op on copies; by torch's functions where a gradient is wanted, or for other dtypes.
    """
    if wants_grad(q, k) or q.dtype not in OP_DTYPES:
        turn = cos_sin.index_select(0, positions).view(*q.shape[:-2], 1, -1)
        return _turned(q, turn, interleaved), _turned(k, turn, interleaved)
    q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    ops.rotary_embedding_(
        q.view(-1, *q.shape[-2:]),
        k.view(-1, *k.shape[-2:]),
        positions,
        cos_sin,
        interleaved=interleaved,
    )
    return q, k


def _turned(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """The formula: x [..., H, D], cos_sin [..., 1, R]; in fp32 at least."""
    size = cos_sin.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos_sin.to(wide).chunk(2, -1)
    turning = x[..., :size].to(wide)
    if interleaved:
        first, second = turning[..., ::2], turning[..., 1::2]
    else:
        first, second = turning.chunk(2, -1)
    pair = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((turned.to(x.dtype), x[..., size:]), -1)
