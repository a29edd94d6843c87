"""The loop behind `LLM`: takes requests, runs steps, hands out what they gave, ends requests."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from fastinfer.engine.buffers import DeviceClock
from fastinfer.engine.outputs import Call, Completion, RequestOutput
from fastinfer.engine.request import Request
from fastinfer.engine.runner import ModelRunner
from fastinfer.engine.sampler import Sampler
from fastinfer.engine.sampling_params import SamplingParams
from fastinfer.engine.scheduler import Scheduler
from fastinfer.models.tokenizer import Tokenizer

_NO_TOKEN = "the model's logits hold NaN, or no finite value, so no token can be drawn from them"


@dataclass(frozen=True)
class EngineStats:
    """What the engine has done so far; the difference of two tells about the time between.

    Attributes:
        steps, tokens: steps that were run, and tokens that were sampled in them.
        step_seconds: time in steps, of which
        wait_seconds: the host did nothing but wait for the device. The rest is the host's own time.
        device_seconds: the device was at work, or waited for a launch within a step.
    """

    steps: int = 0
    tokens: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    device_seconds: float = 0.0

    @property
    def host_seconds(self) -> float:
        return self.step_seconds - self.wait_seconds


class EngineCore:
    """Owns the running completions.

    A step that raises has recorded nothing and can be run again. Should an interrupt come after the
    tokens were recorded, the next step begins by looking at them. Threads take turns step by step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        sampler: Sampler,
        tokenizer: Tokenizer | None,
        eos_token_ids: Sequence[int],
        seed: int,
        clock: DeviceClock,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._seeds = random.Random(seed)  # of requests without a seed
        self._ids = itertools.count()
        self.running: dict[int, Completion] = {}
        self._lock = threading.RLock()
        self._clock = clock
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self._unseen = False  # tokens were recorded that nobody has looked at

    @property
    def stats(self) -> EngineStats:
        clock = self._clock
        return EngineStats(
            self._steps, self._tokens, self._seconds, clock.wait_seconds, clock.busy_seconds
        )

    def submit(
        self, call: Call, prompts: Sequence[tuple[str | None, list[int], SamplingParams]]
    ) -> list[RequestOutput]:
        """Queues prompts (text, token ids, params). If one is refused, none is queued."""
        with self._lock:
            return self._submit(call, prompts)

    def _submit(
        self, call: Call, prompts: Sequence[tuple[str | None, list[int], SamplingParams]]
    ) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        before = set(self.running)
        try:
            for index, (text, ids, params) in enumerate(prompts):
                seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
                output = RequestOutput(next(self._ids), text, ids, [])
                decode = None
                if self._tokenizer is not None:
                    skip = params.skip_special_tokens
                    decode = partial(self._tokenizer.decode, skip_special_tokens=skip)
                for copy in range(params.n):
                    request = Request(next(self._ids), ids, params, seed=_copy_seed(seed, copy))
                    completion = Completion(
                        request, output, index, call, decode, self._eos_token_ids
                    )
                    self._scheduler.add(request)
                    self.running[request.request_id] = completion
                    call.running += 1
                outputs.append(output)
        except BaseException:
            self.abort(lambda completion: completion.request.request_id not in before)
            raise
        return outputs

    def step(self) -> None:
        """Schedules, computes, samples, and passes on what came out."""
        with self._lock:
            start = time.perf_counter()
            self._step()
            self._seconds += time.perf_counter() - start

    def _step(self) -> None:
        if self._unseen:
            self._collect(list(self.running.values()))
        step = self._scheduler.schedule()
        if not step:
            return
        computed = self._runner.run(step)
        requests = [part.request for part in step if part.samples]
        sampled = self._sampler(requests, computed.logits, computed.sampling)
        for request, logprobs in zip(requests, sampled.logprobs, strict=True):
            if logprobs is not None:
                request.logprobs[len(request.output_token_ids) :] = [logprobs]
        self._unseen = True
        self._scheduler.update(step, sampled.token_ids)
        self._steps += 1
        self._tokens += len(requests)
        if not all(sampled.valid):
            for request, valid in zip(requests, sampled.valid, strict=True):
                if not valid:
                    self._end(self.running[request.request_id], "error", _NO_TOKEN)
        running = self.running
        ids = [request.request_id for request in requests]
        self._collect([running[i] for i in ids if i in running])

    def abort(self, which: Callable[[Completion], bool]) -> bool:
        """Ends the running completions that ``which`` chooses; False if there are none."""
        with self._lock:
            chosen = [completion for completion in self.running.values() if which(completion)]
            for completion in chosen:
                self._end(completion, "abort")
        return bool(chosen)

    def _collect(self, completions: Iterable[Completion]) -> None:
        """Looks at the tokens that these have got, and ends those that are complete."""
        for completion in completions:
            try:
                completion.take()
            except Exception as error:  # such as the tokenizer's: it concerns this request alone
                self._end(completion, "error", f"{type(error).__name__}: {error}")
            else:
                if completion.output.finish_reason is not None:
                    self._forget(completion)
        self._unseen = False

    def _end(self, completion: Completion, reason: str, error: str | None = None) -> None:
        try:
            completion.end(reason, error)
        finally:
            self._forget(completion)

    def _forget(self, completion: Completion) -> None:
        request = completion.request
        if not request.is_finished:  # it may be, if an interrupt came between these lines
            self._scheduler.finish(request, completion.output.finish_reason or "abort")
        del self.running[request.request_id]
        completion.call.running -= 1


def _copy_seed(seed: int, copy: int) -> int:
    """The seed of a prompt's copy: its own for copy 0, else one that both determine."""
    return seed if copy == 0 else random.Random(f"{seed} {copy}").getrandbits(63)
