"""`LLM`: a model with its scheduler, pages, runner and sampler; prompts go in, text comes out."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fastinfer import _host
from fastinfer.engine.buffers import DeviceClock, StepLimits
from fastinfer.engine.core import EngineCore, EngineStats
from fastinfer.engine.graphs import Ladder, Recorder
from fastinfer.engine.memory import num_kv_blocks, resolve_device
from fastinfer.engine.outputs import Call, RequestOutput, StreamOutput
from fastinfer.engine.prompts import Message, Prompt, as_list, is_conversation, prepare
from fastinfer.engine.runner import ModelRunner
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.sampling_params import SamplingParams, is_integer
from fastinfer.engine.scheduler import Scheduler
from fastinfer.engine.static_scheduler import StaticScheduler
from fastinfer.models.config import ModelConfig
from fastinfer.models.loader import load
from fastinfer.models.tokenizer import Tokenizer, load_tokenizer

_SCHEDULERS = {"continuous": Scheduler, "static": StaticScheduler}


class LLM:
    """A model that generates text, with continuous batching over a paged KV cache.

    Args:
        model: a folder (safetensors), a GGUF file, a hub id, or "smollm2"; with load_format
            "dummy" a `ModelConfig` as well.
        tokenizer: where the tokenizer is, or one that is loaded; None: with the model.
        dtype: "auto" (fp32 on the CPU), or a torch dtype or its name.
        device: "auto", "cpu" or "cuda".
        max_model_len: tokens of prompt and output together; None: what the model was made for.
        max_num_seqs: at most so many sequences in a step.
        max_num_batched_tokens: at most so many tokens in a step; longer prompts run in chunks.
        gpu_memory_utilization: the share of a GPU's memory to use; no effect on the CPU.
        kv_cache_memory_bytes: size of the KV pool; None: 1 GiB on the CPU, and on a GPU what
            weights and computation leave of ``gpu_memory_utilization``. Never more is taken than
            ``max_num_seqs`` sequences of ``max_model_len`` tokens can fill.
        block_size: tokens a KV block holds, a multiple of 8 in 8..512.
        enable_prefix_caching: reuse the blocks of prompts that begin alike.
        batching: "continuous", or "static" as a baseline for measurements: see `StaticScheduler`.
        enforce_eager: record no CUDA graphs; no effect on the CPU.
        load_format: "auto", "safetensors", "gguf", or "dummy": random weights, by the config alone.
        quantization: such as "int4" or "fp8": rounds layers' weights, or activations too; see
            `load`. A checkpoint that is quantized already (GPTQ, AWQ, compressed-tensors) runs on
            its own codes, without this.
        seed: of the generator that gives requests without a seed theirs.

    Raises:
        TypeError, ValueError: an unknown option, one out of its range, or a device that lacks ops.

    `generate`, `stream` and `step` may be interleaved, also from several threads, which take turns.
    """

    def __init__(
        self,
        model: str | Path | ModelConfig,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 2048,
        gpu_memory_utilization: float = 0.92,
        kv_cache_memory_bytes: int | None = None,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        batching: str = "continuous",
        enforce_eager: bool = False,
        load_format: str = "auto",
        quantization: str | None = None,
        seed: int = 0,
        **unknown: Any,
    ) -> None:
        if unknown:
            raise TypeError(
                f"LLM: unknown option {', '.join(map(repr, unknown))}; "
                f"the options are {', '.join(engine_options())}"
            )
        _positive("max_model_len", max_model_len, optional=True)
        _positive("max_num_seqs", max_num_seqs)
        _positive("max_num_batched_tokens", max_num_batched_tokens)
        _positive("kv_cache_memory_bytes", kv_cache_memory_bytes, optional=True)
        _positive("block_size", block_size)
        _typed("seed", seed, int)
        _typed("enable_prefix_caching", enable_prefix_caching, bool)
        _typed("enforce_eager", enforce_eager, bool)
        _typed("gpu_memory_utilization", gpu_memory_utilization, int | float)
        if block_size % 8 or block_size > 512:
            raise ValueError(f"LLM: block_size must be a multiple of 8 in 8..512, got {block_size}")
        if not 0 < gpu_memory_utilization <= 1:
            raise ValueError(
                f"LLM: gpu_memory_utilization must be in (0, 1], got {gpu_memory_utilization}"
            )
        if not isinstance(batching, str) or batching not in _SCHEDULERS:
            raise ValueError(
                f"LLM: batching must be one of {', '.join(map(repr, _SCHEDULERS))}, "
                f"got {batching!r}"
            )
        self.device = resolve_device(device)
        loaded = load(
            model,
            dtype=dtype,
            device=self.device,
            max_model_len=max_model_len,
            load_format=load_format,
            quantization=quantization,
        )
        self.config = loaded.config
        self.max_model_len = loaded.max_model_len
        self.tokenizer = _tokenizer(tokenizer, loaded.tokenizer_source, load_format == "dummy")
        limits = StepLimits(
            max_num_seqs,
            min(max_num_batched_tokens, max_num_seqs * self.max_model_len),
            self.max_model_len,
        )
        graphs = self.device.type == "cuda" and not enforce_eager
        num_blocks = num_kv_blocks(
            loaded.decoder,
            dtype=loaded.dtype,
            block_size=block_size,
            limits=limits,
            memory=kv_cache_memory_bytes,
            gpu_memory_utilization=gpu_memory_utilization,
            graphs=graphs,
        )
        caching = enable_prefix_caching and batching == "continuous"
        self.blocks = _host.BlockManager(num_blocks, block_size, caching)
        scheduler = _SCHEDULERS[batching](
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        clock = DeviceClock(self.device)
        ladder = Ladder(limits) if graphs else None
        runner = ModelRunner(
            loaded.decoder,
            self.blocks,
            dtype=loaded.dtype,
            limits=limits,
            ladder=ladder,
            record=Recorder(self.device) if graphs else None,
            clock=clock,
        )
        if ladder is not None:
            # The largest first: the others find all the memory they need in what it has taken.
            runner.record_rungs([ladder.mixed[-1], *reversed(ladder.decode)])
        eos = self.tokenizer.eos_token_ids if self.tokenizer else self.config.eos_token_ids
        sampler = Sampler(self.device, limits.max_rows, eos, clock)
        self._core = EngineCore(scheduler, runner, sampler, self.tokenizer, eos, seed, clock)
        self._server = Call(deque())  # of `add_request` and `step`

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Completes one or several prompts; returns a result per prompt, in their order.

        Args:
            prompts: a string, a list of token ids, or a list of chat messages
                (``{"role": …, "content": …}``); or a list of these.
            sampling_params: one for all, or one per prompt; None: `SamplingParams()`.
            use_tqdm: show a progress bar; None: for several prompts on a terminal.

        Raises:
            TypeError, ValueError: a prompt or its parameters are not usable, or it can never fit.
                Nothing has been started then.
        """
        call = Call()
        try:
            outputs = self._submit(call, prompts, sampling_params)
            total = call.running
            show = (total > 1 and sys.stderr.isatty()) if use_tqdm is None else use_tqdm
            with tqdm(total=total, unit="completion", disable=not show) as bar:
                while call.running:
                    self._core.step()
                    bar.update(total - call.running - bar.n)
            return outputs
        finally:
            self._core.abort(lambda completion: completion.call is call)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """`generate` for one or several conversations, each a list of messages."""
        conversations = as_list(messages)
        if not conversations or not all(map(is_conversation, conversations)):
            raise TypeError(f"LLM.chat: expected a list of messages, got {messages!r:.80}")
        return self.generate(messages, sampling_params, use_tqdm=use_tqdm)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamOutput]:
        """Like `generate`, but yields what each step adds. Closing the iterator aborts the rest."""
        stream = self._stream(prompts, sampling_params)
        next(stream)  # submits the requests, so that what is wrong with them is raised here
        return stream

    def _stream(self, prompts: Any, sampling_params: Any) -> Iterator[Any]:
        call = Call(deque())
        try:
            self._submit(call, prompts, sampling_params)
            yield None
            while call.running or call.deltas:
                if call.deltas:
                    yield call.deltas.popleft()
                else:
                    self._core.step()
        finally:
            self._core.abort(lambda completion: completion.call is call)

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queues one prompt for `step`; returns its id. Raises as `generate`, others go on."""
        if len(as_list(prompt)) != 1:
            raise TypeError("LLM.add_request: expected one prompt, got a list of them")
        return self._submit(self._server, prompt, sampling_params)[0].request_id

    def step(self) -> list[StreamOutput]:
        """Runs one step of the engine; returns what it added to the requests of `add_request`."""
        self._core.step()
        deltas = list(self._server.deltas or ())
        self._server.deltas = deque()
        return deltas

    def abort(self, request_id: int) -> bool:
        """Ends a request, whose last `StreamOutput` says "abort"; False if it is not running."""
        return self._core.abort(lambda completion: completion.parent.request_id == request_id)

    @property
    def stats(self) -> EngineStats:
        """What the engine has done so far, and where the time went."""
        return self._core.stats

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._core.running)

    def _submit(self, call: Call, prompts: Any, sampling_params: Any) -> list[RequestOutput]:
        """Checks and encodes all prompts, then queues them."""
        vocab_size = self.config.vocab_size
        return self._core.submit(
            call, prepare(prompts, sampling_params, self.tokenizer, vocab_size)
        )


def engine_options() -> list[str]:
    """The names of the options of `LLM`."""
    parameters = inspect.signature(LLM).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


def _tokenizer(
    given: str | Path | Tokenizer | None, source: Path | None, optional: bool
) -> Tokenizer | None:
    if isinstance(given, Tokenizer):
        return given
    where = given or source
    try:
        return load_tokenizer(where) if where else None
    except FileNotFoundError:
        if given or not optional:
            raise
        return None


def _typed(name: str, value: object, kind: Any) -> None:
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise TypeError(
            f"LLM: {name} must be {getattr(kind, '__name__', 'a number')}, got {value!r}"
        )


def _positive(name: str, value: int | None, optional: bool = False) -> None:
    if value is None and optional:
        return
    if value is None or not is_integer(value):
        raise TypeError(f"LLM: {name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"LLM: {name} must be >= 1, got {value}")
