"""`FlashAttention`: attention over dense or ragged batches as a module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastinfer import ops


class FlashAttention(nn.Module):
    """out_i = sum_j softmax_j(scale * q_i . k_j) v_j over the keys that query i sees.

    Args:
        causal: a query sees no key after its own position; the last query stands at the last key.
        scale: factor of the scores; None is 1 / sqrt(D).
        window_left, window_right: how many positions before and after its own a query sees; -1 is
            no limit.
        softcap: c in c * tanh(s / c); 0 is off.
        num_sinks: query heads that have a sink, a logit in the denominator alone: all or none (0).
            They are the fp32 buffer `sinks`, -inf (no sink) until they are loaded.
        batch_invariant: a row's bits do not depend on the rest of the batch.
        device: where the sinks are.

    See `fastinfer.ops.flash_attention` for the whole definition. There is no derivative: inputs
    that require grad raise NotImplementedError while grad mode is on.

    Dao, "FlashAttention-2", 2023.
    """

    sinks: Tensor | None

    def __init__(
        self,
        *,
        causal: bool = False,
        scale: float | None = None,
        window_left: int = -1,
        window_right: int = -1,
        softcap: float = 0.0,
        num_sinks: int = 0,
        batch_invariant: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.causal = causal
        self.scale = scale
        self.window_left, self.window_right = window_left, window_right
        self.softcap = softcap
        self.batch_invariant = batch_invariant
        sinks = torch.full((num_sinks,), -torch.inf, dtype=torch.float32, device=device)
        self.register_buffer("sinks", sinks if num_sinks else None)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """Attention over a dense batch, or, with `cu_seqlens_q`, over sequences one after another.

        Args:
            q: [B, Sq, H, D]; ragged [Tq, H, D].
            k: [B, Sk, Hk, D]; ragged [Tk, Hk, D]; H is a multiple of Hk.
            v: [B, Sk, Hk, Dv]; ragged [Tk, Hk, Dv].
            cu_seqlens_q, cu_seqlens_k: int32 [B + 1]; the latter None: the former.
            max_seqlen_q, max_seqlen_k: at least the longest sequence's length; None: all tokens.

        Returns:
            [B, Sq, H, Dv] or [Tq, H, Dv] in q's dtype.

        Raises:
            NotImplementedError: an input requires grad, outside of `torch.no_grad()`.
            ValueError: shapes, dtypes or options do not fit.
        """
        if cu_seqlens_q is None:
            if cu_seqlens_k is not None:
                raise ValueError(
                    "FlashAttention: cu_seqlens_q: expected a tensor beside cu_seqlens_k, got None"
                )
            out, _ = ops.flash_attention(
                q, k, v, scale=self.scale, causal=self.causal, window_left=self.window_left,
                window_right=self.window_right, softcap=self.softcap, sinks=self._sinks(),
                batch_invariant=self.batch_invariant,
            )  # fmt: skip
            return out
        out, _ = ops.flash_attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k,
            max_seqlen_q=q.shape[0] if max_seqlen_q is None else max_seqlen_q,
            max_seqlen_k=k.shape[0] if max_seqlen_k is None else max_seqlen_k,
            scale=self.scale, causal=self.causal, window_left=self.window_left,
            window_right=self.window_right, softcap=self.softcap, sinks=self._sinks(),
            batch_invariant=self.batch_invariant,
        )  # fmt: skip
        return out

    def extra_repr(self) -> str:
        """What sets this module apart, for print()."""
        return (
            f"causal={self.causal}, scale={self.scale}, window_left={self.window_left}, "
            f"window_right={self.window_right}, softcap={self.softcap}"
        )

    def _sinks(self) -> Tensor | None:
        # `half()` and the like cast buffers; the op takes fp32.
        return None if self.sinks is None else self.sinks.float()
