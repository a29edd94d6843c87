"""What the engine gives back: deltas while a request runs, and the whole when it has ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from fastinfer.engine.detokenizer import IncrementalDecoder, StopStrings, decode_all
from fastinfer.engine.request import Request


@dataclass
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which of the ``n`` completions.
        text: the text so far, without the stop string unless the request asked for it.
        token_ids: every generated token, the one that ended the completion included.
        finish_reason: "stop" (end of text, stop token or stop string), "length" (max_tokens or the
            end of the context), "abort", "error" (see ``error``), or None while it runs.
        logprobs: one dict a token, token id -> log-probability; None unless asked for.
        error: what went wrong with it, such as logits that are NaN. Other requests go on.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[dict[int, float]] | None = None
    error: str | None = None


@dataclass
class RequestOutput:
    """A prompt with its completions; the properties are shortcuts to the first completion."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        return self.outputs[0].logprobs

    @property
    def error(self) -> str | None:
        return self.outputs[0].error


@dataclass
class StreamOutput(CompletionOutput):
    """What one step added to one completion; put together they are its `CompletionOutput`.

    ``text`` may be empty although tokens came (part of a character, or of a possible stop string),
    and the last one, which has a ``finish_reason``, may bring text that was held back.
    ``request_id`` is what `LLM.add_request` returned, ``prompt_index`` the prompt's place in the
    `LLM.stream` call.
    """

    request_id: int = 0
    prompt_index: int = 0


@dataclass
class Call:
    """Who waits: a `generate`, a `stream`, or all users of `add_request` together."""

    deltas: deque[StreamOutput] | None = None  # None: only the whole results are wanted
    running: int = 0


class Completion:
    """A running request: detokenizes its tokens into its output, and decides when it ends.

    It works from the request's state, not from what a step returned, so an interrupted step loses
    nothing. ``decode`` turns token ids into text; where it is None the text stays empty. Where
    nobody looks at the text before its end, neither a stream nor a stop string, it is made then.
    """

    def __init__(
        self,
        request: Request,
        parent: RequestOutput,
        prompt_index: int,
        call: Call,
        decode: Callable[[list[int]], str] | None,
        eos_token_ids: Collection[int],
    ) -> None:
        params = request.params
        self.request = request
        self.parent = parent
        self.call = call
        self.output = CompletionOutput(
            len(parent.outputs), logprobs=None if params.logprobs is None else []
        )
        parent.outputs.append(self.output)
        self._prompt_index = prompt_index
        self._stops = StopStrings(params.stop or (), params.include_stop_str_in_output)
        self._decode = decode
        self._decoder: IncrementalDecoder | None = None
        if decode and (params.stop or call.deltas is not None):
            self._decoder = IncrementalDecoder(decode, request.prompt_token_ids)
        self._min_tokens = params.min_tokens
        self._stop_ids = set(params.stop_token_ids or ())
        if not params.ignore_eos:
            self._stop_ids |= set(eos_token_ids)

    def take(self) -> None:
        """Processes the request's new tokens, up to the one that ends the completion."""
        output, text = self.output, ""
        done = len(output.token_ids)
        for token in self.request.output_token_ids[done:]:
            text += self._take_token(token)
            if output.finish_reason is not None:
                break
        if text or (self.call.deltas is not None and len(output.token_ids) > done):
            self._give(text, done)

    def end(self, reason: str, error: str | None = None) -> None:
        """Ends the completion from outside: "abort" or "error"."""
        self.output.finish_reason, self.output.error = reason, error
        self._give("" if error else self._flush(), len(self.output.token_ids))

    def _take_token(self, token: int) -> str:
        output = self.output
        output.token_ids.append(token)
        count = len(output.token_ids)
        if output.logprobs is not None:
            output.logprobs.append(self.request.logprobs[count - 1])
        may_stop = count >= self._min_tokens
        if may_stop and token in self._stop_ids:
            output.finish_reason = "stop"
            shown = self.request.params.include_stop_str_in_output
            text = self._push(token, False) if shown else ""
            return text + self._flush(hidden=not shown)
        text = self._push(token, may_stop) if self._decoder else ""
        if self._stops.stopped:
            output.finish_reason = "stop"
        elif count >= self.request.max_output_tokens:
            output.finish_reason = "length"
            text += self._flush()
        return text

    def _push(self, token: int, may_stop: bool) -> str:
        return self._stops.push(self._decoder.push(token), may_stop) if self._decoder else ""

    def _flush(self, hidden: bool = False) -> str:
        """The text held back: an unfinished character, the beginning of a stop string, or all.

        ``hidden``: the last token does not show.
        """
        if self._decoder is None:
            tokens = self.output.token_ids[:-1] if hidden else self.output.token_ids
            prompt = self.request.prompt_token_ids
            return decode_all(self._decode, prompt, tokens) if self._decode else ""
        if self._stops.stopped:
            return ""
        return self._stops.push(self._decoder.flush(), active=False) + self._stops.flush()

    def _give(self, text: str, first: int) -> None:
        """Adds text to the output, and queues it with the tokens from ``first`` for a stream."""
        output = self.output
        output.text += text
        if self.call.deltas is not None:
            delta = StreamOutput(
                index=output.index,
                text=text,
                token_ids=output.token_ids[first:],
                finish_reason=output.finish_reason,
                logprobs=None if output.logprobs is None else output.logprobs[first:],
                error=output.error,
                request_id=self.parent.request_id,
                prompt_index=self._prompt_index,
            )
            self.call.deltas.append(delta)
