"""Typed, documented wrappers of `torch.ops.fastinfer.*`, one file per family."""

from fastinfer.ops.norm import (
    fused_add_layer_norm_,
    fused_add_rms_norm_,
    layer_norm,
    rms_norm,
)

__all__ = [
    "fused_add_layer_norm_",
    "fused_add_rms_norm_",
    "layer_norm",
    "rms_norm",
]
