"""Quantizing and measuring whole models: what stands above `fastinfer.models`.

The algorithms are in `fastinfer.quant`, which knows tensors alone; here they meet the decoder, the
checkpoints and the tokenizers.
"""

from fastinfer.quantizer.calibration import calibration_windows, read_texts
from fastinfer.quantizer.driver import ProjectionReport, quantize_model
from fastinfer.quantizer.perplexity import Perplexity, evaluation_tokens, perplexity

__all__ = [
    "Perplexity",
    "ProjectionReport",
    "calibration_windows",
    "evaluation_tokens",
    "perplexity",
    "quantize_model",
    "read_texts",
]
