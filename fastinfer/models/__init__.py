"""One configurable decoder, its configuration, the loaders of checkpoints and the tokenizer."""

from fastinfer.models.batch import Batch
from fastinfer.models.config import ModelConfig
from fastinfer.models.decoder import Decoder
from fastinfer.models.loader import LoadedModel, load
from fastinfer.models.tokenizer import Tokenizer, load_tokenizer

__all__ = ["Batch", "Decoder", "LoadedModel", "ModelConfig", "Tokenizer", "load", "load_tokenizer"]
