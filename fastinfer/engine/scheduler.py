"""Decides which tokens of which requests the next step computes.

There are no prefill and decode phases. A request knows some tokens (its prompt and what was
sampled), and the keys and values of the first few of them are in the cache; each step computes
some of the rest, under a budget. A prompt, a chunk of one, a decoded token and a recomputation are
the same thing.

Order is first come, first served, and never changes: the running requests followed by the waiting
ones are always in the order in which they arrived. The oldest is served first, and the youngest
loses its blocks when they run out. So the oldest request advances in every step and never loses
its blocks, which is why no request waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from fastinfer._host import BlockManager
from fastinfer.engine.request import Request, RequestStatus

_RUNNING, _FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED


class ScheduledSequence(NamedTuple):
    """A request's part in a step: its tokens [start, start + num_tokens).

    ``samples``: they reach the last token known, so the step's logits give the next one.
    ``padding``: so many tokens that mean nothing are computed behind them (static batches only).
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool
    padding: int = 0


class Scheduler:
    """Continuous batching over the blocks of a `BlockManager`.

    The caller repeats: ``step = schedule()``; compute it; ``update(step, tokens)``; ``finish`` each
    request that has come to its end. Between any two of these calls it may add and abort.

    Args:
        kv: the blocks; nobody else may change sequences that belong to this scheduler.
        max_num_seqs: at most so many running requests (>= 1).
        max_num_batched_tokens: at most so many tokens a step (>= 1); longer prompts are chunked.
        max_model_len: the context: prompt and output tokens of a request (>= 2).

    Raises:
        ValueError: a limit is too small.
    """

    def __init__(
        self,
        kv: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
    ) -> None:
        limits = (max_num_seqs, 1), (max_num_batched_tokens, 1), (max_model_len, 2)
        names = "max_num_seqs", "max_num_batched_tokens", "max_model_len"
        for name, (value, least) in zip(names, limits, strict=True):
            if value < least:
                raise ValueError(f"Scheduler: {name} must be >= {least}, got {value}")
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        # A new request leaves so many blocks to the running ones, or it would soon be preempted.
        self._headroom = kv.num_blocks // 100
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._requests: dict[int, Request] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queues a new request and sets its ``max_output_tokens``.

        ``params.max_tokens`` is capped to what the context leaves after the prompt (None means all
        of that).

        Raises:
            ValueError: the request can never run: its prompt is empty or longer than
                ``max_model_len - 1``, or prompt and output do not fit into all blocks together; or
                it was added before, or its id is in use. No other request is affected.
        """
        name, prompt_len = f"request {request.request_id}", len(request.prompt_token_ids)
        if request.status is not RequestStatus.WAITING or request.output_token_ids:
            raise ValueError(f"{name}: expected a new request, got one that was used before")
        if prompt_len == 0:
            raise ValueError(f"{name}: the prompt is empty; expected at least one token")
        if prompt_len >= self._max_model_len:
            raise ValueError(
                f"{name}: expected a prompt of at most {self._max_model_len - 1} tokens "
                f"(max_model_len - 1), got {prompt_len}"
            )
        room = self._max_model_len - prompt_len
        wanted = room if request.params.max_tokens is None else request.params.max_tokens
        if wanted < 1:
            raise ValueError(f"{name}: expected max_tokens >= 1, got {wanted}")
        max_output = min(wanted, room)
        # The last token sampled is never computed.
        slots, capacity = prompt_len + max_output - 1, self._kv.num_blocks * self._kv.block_size
        if slots > capacity:
            raise ValueError(
                f"{name}: {prompt_len} prompt tokens and up to {max_output} output tokens need "
                f"{slots} slots of the KV cache, which has {capacity}; use a smaller max_tokens "
                "or more memory for the cache"
            )
        self._kv.add(request.request_id, request.prompt_token_ids)  # refuses an id in use
        p = request.params
        top_k = min(p.top_k, 2**31 - 1)  # above every vocabulary: off
        self._kv.set_sampling(
            request.request_id, p.temperature, top_k, p.top_p, p.min_p, request.seed
        )
        request.max_output_tokens = max_output
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def abort(self, request_id: int) -> Request | None:
        """Ends a request with reason "abort"; None if no unfinished request has that id.

        If it is part of a step that is being computed, `update` ignores it there.
        """
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, "abort")
        return request

    def finish(self, request: Request, reason: str) -> None:
        """Ends a request and gives its blocks back; it keeps its tokens.

        Raises:
            ValueError: it is not an unfinished request of this scheduler.
        """
        if self._requests.get(request.request_id) is not request:
            raise ValueError(f"request {request.request_id}: expected an unfinished request")
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        self._give_back(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason

    def schedule(self) -> list[ScheduledSequence]:
        """The next step: empty only when there is no unfinished request.

        Running requests come first, oldest first, then waiting ones are admitted in order as long
        as budget, ``max_num_seqs`` and blocks allow. When a running request finds no block, the
        youngest running one is preempted: it goes back to the front of the queue, keeps its
        tokens, and will compute them again. A step that is never computed may simply be
        scheduled again.

        Raises:
            RuntimeError: a request was not finished although it has ``max_output_tokens``, or
                someone else holds the blocks that the oldest request needs.
        """
        step: list[ScheduledSequence] = []
        budget = self._max_num_batched_tokens
        running = self._running
        for request in running:
            if budget <= 0:
                break
            part = _part(request, budget)
            step.append(part)
            budget -= part.num_tokens
        budget += self._reserve(step)
        while (
            self._waiting
            and budget > 0
            and len(running) < self._max_num_seqs
            and self._admit(self._waiting[0])
        ):
            running.append(self._waiting.popleft())
            step.append(_part(running[-1], budget))
            budget -= step[-1].num_tokens
        if self._requests and not step:
            raise RuntimeError(
                f"Scheduler.schedule: no blocks for request {self._waiting[0].request_id}, the "
                f"oldest one: {self._kv.num_used} of {self._kv.num_blocks} belong to someone else"
            )
        return step

    def update(self, step: Sequence[ScheduledSequence], tokens: Sequence[int]) -> None:
        """Records that a step was computed.

        Args:
            step: what `schedule` returned.
            tokens: the tokens sampled, in order: one for each sequence that ``samples``.

        Sequences that were finished or aborted since are skipped.

        Raises:
            ValueError: another number of tokens than the step samples, or not the latest step;
                nothing is recorded.
        """
        expected = sum(s.samples for s in step)
        if len(tokens) != expected:
            raise ValueError(
                f"Scheduler.update: expected {expected} tokens, one for each sequence of the step "
                f"that samples, got {len(tokens)}"
            )
        sampled = iter(tokens)
        news = [next(sampled) if part.samples else -1 for part in step]
        if any(part.request.status is _FINISHED for part in step):
            left = [i for i, part in enumerate(step) if not part.request.is_finished]
            step, news = [step[i] for i in left], [news[i] for i in left]
        for part in step:
            request = part.request
            if request.num_computed_tokens != part.start or request.status is not _RUNNING:
                raise ValueError(
                    f"Scheduler.update: expected the latest step, but request {request.request_id} "
                    f"is {request.status.value} at token {request.num_computed_tokens}, in the "
                    f"step at {part.start}"
                )
        ends = [part.start + part.num_tokens for part in step]
        self._kv.record([part.request.request_id for part in step], ends, news)
        for part, end, token in zip(step, ends, news, strict=True):
            part.request.num_computed_tokens = end
            if token >= 0:
                part.request.output_token_ids.append(token)

    def _reserve(self, step: list[ScheduledSequence]) -> int:
        """Takes the blocks that a step's sequences need, oldest first.

        As long as they do not suffice, the youngest request is preempted. What that takes out of
        the step is at its end; returns how many tokens it was.
        """
        done, dropped = 0, 0
        ids = [part.request.request_id for part in step]
        ends = [part.start + part.num_tokens for part in step]
        while True:
            done += self._kv.reserve_each(ids[done : len(step)], ends[done : len(step)])
            if done == len(step):
                return dropped
            if self._preempt_youngest() is step[-1].request:
                dropped += step.pop().num_tokens

    def _admit(self, request: Request) -> bool:
        """Takes blocks for all tokens that a waiting request knows; if they do not fit, for none.

        The whole prompt is reserved although the first step may compute only a chunk of it. Begun
        on a few blocks, a long prompt would soon have to give them back, its work lost.
        """
        cached = self._kv.match_prefix(request.request_id)
        blocks = -(-(request.num_tokens - cached) // self._kv.block_size)
        headroom = self._headroom if self._running else 0
        if blocks + headroom > self._kv.num_available or not self._kv.reserve(
            request.request_id, request.num_tokens
        ):
            self._kv.release(request.request_id)
            return False
        request.num_computed_tokens = request.num_cached_tokens = cached
        request.status = RequestStatus.RUNNING
        return True

    def _give_back(self, request: Request) -> None:
        self._kv.remove(request.request_id)

    def _preempt_youngest(self) -> Request:
        request = self._running.pop()
        self._kv.release(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.WAITING
        self._waiting.appendleft(request)
        return request


def _part(request: Request, budget: int) -> ScheduledSequence:
    """What a running request computes next, within the budget."""
    num_outputs = len(request.output_token_ids)
    if num_outputs >= request.max_output_tokens:
        # Going on would write past what `Scheduler.add` made sure of.
        raise RuntimeError(
            f"request {request.request_id} has all of its {request.max_output_tokens} output "
            "tokens; it should have been finished"
        )
    start, known = request.num_computed_tokens, len(request.prompt_token_ids) + num_outputs
    num_tokens = min(known - start, budget)
    samples = start + num_tokens == known
    # What ScheduledSequence(...) does, in half the time.
    return tuple.__new__(ScheduledSequence, (request, start, num_tokens, samples, 0))
