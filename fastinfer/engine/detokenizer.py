"""Tokens to text, one at a time: whole characters only, and stop strings are found and cut off."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
_CONTEXT_TOKENS = 6  # prompt tokens decoded along with the first output tokens
_WINDOW_TOKENS = 8  # decode at least that many tokens before the window moves on
_MAX_HELD_TOKENS = 32  # more without a whole character is no character: give it out as it is


def decode_all(
    decode: Callable[[list[int]], str], context: Sequence[int], tokens: Sequence[int]
) -> str:
    """The text that an `IncrementalDecoder` gives for all of these tokens, in one go."""
    window = list(context[-_CONTEXT_TOKENS:])
    sent = len(decode(window).rstrip(_REPLACEMENT)) if window else 0
    text = decode(window + list(tokens))[sent:]
    if _REPLACEMENT not in text:
        return text
    # Where bytes are no characters, the result may depend on where the window was cut.
    decoder = IncrementalDecoder(decode, context)
    return "".join([*map(decoder.push, tokens), decoder.flush()])


class IncrementalDecoder:
    """Turns a growing list of tokens into text that never has to be taken back.

    Each step decodes only a short window of tokens, so a token costs O(1) amortised. The window
    starts some tokens back, where the text was whole: decoders treat the start of a text specially
    (they drop a leading space), and several tokens may make one character.

    Args:
        decode: token ids to text.
        context: the tokens before the first one; they are not part of the text.
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-_CONTEXT_TOKENS:])
        text = decode(self._window) if self._window else ""
        self._sent = len(text.rstrip(_REPLACEMENT))  # characters of the window's text given out
        # How many of the window's tokens make whole characters.
        self._whole = len(self._window) if self._sent == len(text) else 0

    def push(self, token: int) -> str:
        """Adds a token; returns the text that became certain by it."""
        self._window.append(token)
        text = self._decode(self._window)
        hopeless = len(self._window) - self._whole > _MAX_HELD_TOKENS
        certain = text if hopeless else text.rstrip(_REPLACEMENT)
        new = certain[self._sent :]
        self._sent = max(self._sent, len(certain))
        if len(certain) == len(text):
            if len(self._window) > _WINDOW_TOKENS:
                del self._window[: self._whole]
                self._sent = len(self._decode(self._window))
            self._whole = len(self._window)
        return new

    def flush(self) -> str:
        """The text still held back: the replacement characters of an unfinished character."""
        return self._decode(self._window)[self._sent :] if len(self._window) > self._whole else ""


class StopStrings:
    """Finds stop strings in a text that arrives in pieces, and holds back what may become one.

    The first stop string to be complete wins; of several complete at the same character, the
    longest. So the result does not depend on how the text is cut into pieces. ``include`` leaves
    the stop string at the end of the text.
    """

    def __init__(self, strings: Sequence[str] = (), include: bool = False) -> None:
        self._strings = tuple(strings)
        self._reach = max(map(len, strings), default=1) - 1
        self._include = include
        self._tail = ""  # the text's last characters, as many as a stop string may reach back
        self._held = 0  # how many of them have not been given out
        self.stopped = False

    def push(self, text: str, active: bool = True) -> str:
        """Adds text; returns what may be given out. Sets `stopped` when a stop string is complete.

        With ``active`` False (before min_tokens) strings that become complete here are let through.
        """
        if not self._strings:
            return text
        known = len(self._tail)
        buffer = self._tail + text
        first_unsent = known - self._held
        if active and text:
            end, start = self._find(buffer, known)
            if end >= 0:
                self.stopped = True
                self._tail, self._held = "", 0
                # What a stop string began with was held back, so it starts after first_unsent.
                return buffer[first_unsent : end if self._include else start]
        # What may be the beginning of a stop string waits; if the string may stay, nothing does.
        strings = () if self._include else self._strings
        begins = (n for s in strings for n in range(1, len(s)) if buffer.endswith(s[:n]))
        held = max(begins, default=0)
        self._tail = buffer[max(0, len(buffer) - self._reach) :]
        self._held = held
        return buffer[first_unsent : len(buffer) - held]

    def flush(self) -> str:
        """The text still held back, when generation ends for another reason."""
        return self._tail[len(self._tail) - self._held :]

    def _find(self, buffer: str, known: int) -> tuple[int, int]:
        """(end, start) of the first stop string that ends after ``known`` characters, or -1s."""
        begins = [(s, buffer.find(s, max(0, known - len(s) + 1))) for s in self._strings]
        return min(((i + len(s), i) for s, i in begins if i >= 0), default=(-1, -1))
