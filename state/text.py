"""Token ids to bytes, and stop strings on bytes."""

import codecs
from collections.abc import Iterable

import numpy as np
from blake3 import blake3

from purestep.state.hashing import framed
from purestep.state.scores import locked


class TokenTable:
    """What each vocabulary id adds to a text, in bytes. Immutable; equal by content.

    Bytes, since one token may hold half a character: joining bytes first and decoding once never
    shows a replacement character that the text does not have.
    """

    __slots__ = ("_digest", "_length", "_whole", "pieces")

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = tuple(pieces)
        self._whole = tuple(map(_whole, self.pieces))
        self._length = locked(np.array([*map(len, self.pieces), 0], np.int32))
        self._digest = blake3(framed("purestep/tokens/1", *self.pieces)).digest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenTable) and self._digest == other._digest

    def __hash__(self) -> int:
        return int.from_bytes(self._digest[:8], "little")

    def text(self, tokens: np.ndarray) -> str:
        """Text for people: an unfinished character at the end shows as a replacement character."""
        return decode(self.join(tokens))

    def piece(self, token: int) -> bytes:
        """The bytes of one token; none for an id the tokenizer does not know."""
        return self.pieces[token] if token < len(self.pieces) else b""

    def wholes(self, tokens: np.ndarray) -> list[str | None]:
        """The text of each token by itself; None for one that holds parts of characters."""
        whole, known = self._whole, len(self._whole)
        return [whole[t] if t < known else "" for t in tokens.tolist()]

    def lengths(self, tokens: np.ndarray) -> np.ndarray:
        """int32, how many bytes each token adds."""
        return self._length.take(tokens, mode="clip")

    def join(self, tokens: np.ndarray) -> bytes:
        """The bytes of a run of tokens; ids the tokenizer does not know add nothing."""
        known = len(self.pieces)
        return b"".join(self.pieces[t] for t in tokens.tolist() if t < known)


def find_stop(text: bytes, start: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """The earliest stop string that ends after byte `start`: (where it begins, which).

    Of several that begin at one place the longest counts. Only bytes before `start` were searched
    before, so a match may begin up to a stop string's length earlier.
    """
    best: tuple[int, int, str] | None = None
    for stop in stops:
        needle = stop.encode()
        at = text.find(needle, max(0, start - len(needle) + 1))
        if at >= 0 and (best is None or (at, -len(needle)) < best[:2]):
            best = (at, -len(needle), stop)
    return None if best is None else (best[0], best[2])


def tellable(text: bytes, start: int, stops: tuple[str, ...]) -> int:
    """Up to which byte `text` can be told, where `start` bytes were told before.

    What may be the beginning of a stop string is held back, and so is half a character; so what
    is told, decoded piece by piece, is always a prefix of the final text.
    """
    end = len(text) - overlap(text, stops)
    if text[start:end].isascii():
        return max(start, end)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(text[start:end])
    return max(start, end - len(decoder.getstate()[0]))


def overlap(text: bytes, stops: tuple[str, ...]) -> int:
    """The length of the longest end of `text` that one of `stops` begins with, but for all of it:
    what has to be kept of a text to find them in what comes behind."""
    return max((_overlap(text, stop.encode()) for stop in stops), default=0)


def _overlap(text: bytes, needle: bytes) -> int:
    most = min(len(text), len(needle) - 1)
    return next((n for n in range(most, 0, -1) if needle.startswith(text[-n:])), 0)


def decode(text: bytes) -> str:
    """Text for people: an unfinished character at the end shows as a replacement character."""
    return text.decode("utf-8", errors="replace")


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
