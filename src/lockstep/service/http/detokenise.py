"""Text of tokens as they come: the same text, whether it is streamed or not."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.models.tokenizer import Tokenizer

CONTEXT = 5  # tokens before the completion by which decoders decide about a space at its start
INCOMPLETE = 3  # replacement characters at the end that may yet become a character of up to four bytes
LONGEST_HELD = 64  # tokens that are held for a character that does not come


class Detokeniser:
    """Decodes token by token; text comes out when no later token can change it.

    before: the prompt's ids. Every token is decoded with the few before it, for decoders that treat the start of a text
    otherwise.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()):
        self._decode = tokenizer.decode
        self._ids = list(before[-CONTEXT:])
        self._prefix = self._decode(self._ids) if self._ids else ""
        if self._prefix.endswith("\ufffd"):  # the prompt ends within a character: its bytes are no context
            self._ids, self._prefix = [], ""
        self._read = len(self._ids)
        self._sent = 0

    def push(self, token: int) -> str:
        """The text that is certain with this token."""
        self._ids.append(token)
        text = self._decode(self._ids)[len(self._prefix) :]
        # Where one byte of a run is missing, some decoders replace every byte of it, those of the prefix too.
        most = INCOMPLETE + len(self._prefix.encode()) - len(self._prefix)
        stable = len(text)
        while stable and len(text) - stable < most and text[stable - 1] == "\ufffd":
            stable -= 1
        new, certain = text[self._sent : stable], stable == len(text)
        if len(self._ids) - self._read >= LONGEST_HELD and not (certain and text):
            new = text[self._sent :]
            self._ids, self._prefix, self._read, self._sent = [], "", 0, 0
        elif certain and text:
            self._ids = self._ids[self._read :]
            self._prefix, self._read, self._sent = self._decode(self._ids), len(self._ids), 0
        else:  # tokens without text (special ones) stay with those before them, too
            self._sent = max(self._sent, stable)
        return new

    def finish(self) -> str:
        """What was held back; nothing comes after it."""
        return self._decode(self._ids)[len(self._prefix) + self._sent :]


class StopCutter:
    """Cuts a text before the stop text that is completed first (of those completed at once, the longest)."""

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """The text that cannot belong to a stop text any more; nothing once it has stopped."""
        if self.stopped or not piece:
            return ""
        if not self._stops:
            return piece
        text, start = self._held + piece, len(self._held)
        ends = [(at + len(s), at) for s in self._stops if (at := text.find(s, max(0, start - len(s) + 1))) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        keep = next(
            (n for n in range(min(self._longest - 1, len(text)), 0, -1) if text.endswith(self._beginnings(n))), 0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _beginnings(self, length: int) -> tuple[str, ...]:
        return tuple(s[:length] for s in self._stops if len(s) > length)
