"""Drop-in modules built on `fastinfer.ops`."""

from fastinfer.nn.low_bit_linear import Int4Linear, Int8Linear, LowBitLinear
from fastinfer.nn.merged_linear import MergedLinear

__all__ = ["Int4Linear", "Int8Linear", "LowBitLinear", "MergedLinear"]
