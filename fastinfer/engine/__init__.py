"""The engine: requests are batched continuously over a paged KV cache."""

from fastinfer.engine.llm import LLM
from fastinfer.engine.outputs import CompletionOutput, RequestOutput, StreamOutput
from fastinfer.engine.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "StreamOutput"]
