"""Quantization of weights: recipes, and algorithms as pure functions of tensors."""

from fastinfer.quant.recipe import Recipe, Scheme

__all__ = ["Recipe", "Scheme"]
