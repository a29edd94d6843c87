"""Quantizing and measuring whole models: what stands above `fastinfer.models`.

The algorithms are in `fastinfer.quant`, which knows tensors alone; here they meet the decoder, the
checkpoints and the tokenizers.
"""

from fastinfer.quantizer.calibration import calibration_windows, read_texts
from fastinfer.quantizer.perplexity import Perplexity, evaluation_tokens, perplexity

__all__ = [
    "Perplexity",
    "calibration_windows",
    "evaluation_tokens",
    "perplexity",
    "read_texts",
]
