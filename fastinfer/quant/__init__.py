"""Quantization of weights: recipes, and algorithms as pure functions of tensors."""

from fastinfer.quant.awq import awq, awq_scales, fold_into_norm
from fastinfer.quant.gptq import gptq
from fastinfer.quant.grid import Quantized
from fastinfer.quant.recipe import Recipe, Scheme
from fastinfer.quant.rtn import rtn
from fastinfer.quant.statistics import InputStatistics

__all__ = [
    "InputStatistics",
    "Quantized",
    "Recipe",
    "Scheme",
    "awq",
    "awq_scales",
    "fold_into_norm",
    "gptq",
    "rtn",
]
