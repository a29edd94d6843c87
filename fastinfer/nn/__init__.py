"""Drop-in modules built on `fastinfer.ops`."""

from fastinfer.nn._linear import QuantizedLinear
from fastinfer.nn.attention import FlashAttention
from fastinfer.nn.gated_mlp import GatedMLP, GeGLU, SwiGLU
from fastinfer.nn.low_bit_linear import Int4Linear, Int8Linear, LowBitLinear
from fastinfer.nn.merged_linear import MergedLinear
from fastinfer.nn.norm import LayerNorm, RMSNorm
from fastinfer.nn.rotary import RotaryEmbedding
from fastinfer.nn.w8a8_linear import FP8Linear, Int8W8A8Linear, W8A8Linear

__all__ = [
    "FP8Linear",
    "FlashAttention",
    "GatedMLP",
    "GeGLU",
    "Int4Linear",
    "Int8Linear",
    "Int8W8A8Linear",
    "LayerNorm",
    "LowBitLinear",
    "MergedLinear",
    "QuantizedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "W8A8Linear",
]
