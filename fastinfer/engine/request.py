"""One generation request and where it stands."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastinfer.engine.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """Where a request is: waiting -> running -> finished, and back to waiting when preempted."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A prompt, its options, and the state that the scheduler keeps of it.

    Attributes:
        request_id: unique among the unfinished requests; also its id in the `BlockManager`.
        prompt_token_ids: the prompt, as a tuple.
        params: how to sample, when to end.
        seed: of the random numbers of this request (``params.seed``, or one drawn for it).
        max_output_tokens: ``params.max_tokens`` capped to the context; set by `Scheduler.add`.
        output_token_ids: the tokens sampled so far; preemption keeps them.
        logprobs: one entry for each output token, as the sampler gives them; empty when not asked
            for. Filled by the engine.
        num_computed_tokens: how many tokens, from the first, have keys and values in the cache.
        num_cached_tokens: how many of them a prefix hit spared when it was last admitted.
        num_preemptions: how often the request lost its blocks.
        plain: its tokens are drawn from the logits as they are: no bias, no penalty, no minimum
            length, no logprobs.
        status: see `RequestStatus`.
        finish_reason: "stop", "length", "abort", or another reason given to `Scheduler.finish`.
    """

    request_id: int
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int = 0
    max_output_tokens: int = field(default=0, init=False)
    output_token_ids: list[int] = field(default_factory=list, init=False)
    logprobs: list[dict[int, float]] = field(default_factory=list, init=False)
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_tokens: int = field(default=0, init=False)
    num_preemptions: int = field(default=0, init=False)
    plain: bool = field(default=True, init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    finish_reason: str | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.prompt_token_ids = tuple(self.prompt_token_ids)
        p = self.params
        penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        self.plain = (
            penalties == (1, 0, 0) and not p.logit_bias and p.min_tokens == 0 and p.logprobs is None
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED
