"""The two files of a batch run: lines read lazily, results kept safe.

A result is one line that is written whole and flushed before the next one, and the file is synced
in groups. So a killed process leaves at most one torn line at the end, which the next run cuts.
"""

import fcntl
import json
import os
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from purestep.state.errors import BatchFileError

BOM = b"\xef\xbb\xbf"
START = b'{"line":'  # of every record
SYNC_SECONDS = 1.0  # at most this much of a run is lost to a power cut


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank. `raw` is without its end, None where it is longer than allowed."""

    number: int  # from 1, blank lines count
    digest: int  # 64 bits of blake3 over its bytes, never 0
    raw: bytes | None


def read_lines(path: Path, max_bytes: int) -> Iterator[Line]:
    """The lines of a file, of which one at a time is held, and less than `max_bytes` of it."""
    with path.open("rb") as file:
        number = 0
        while chunk := file.readline(max_bytes):
            number += 1
            hasher = blake3()
            whole = True
            while not chunk.endswith(b"\n") and len(chunk) == max_bytes:
                hasher.update(chunk)
                whole = False
                chunk = file.readline(max_bytes)
            raw = chunk.rstrip(b"\r\n")
            hasher.update(raw)
            if number == 1 and whole:
                raw = raw.removeprefix(BOM)
            if not whole or raw.strip():
                yield Line(number, _digest(hasher), raw if whole else None)


def _digest(hasher: blake3) -> int:
    return int.from_bytes(hasher.digest(8), "little") or 1


def count_lines(path: Path) -> int:
    """How many lines a file has."""
    count, last = 0, b"\n"
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            count += chunk.count(b"\n")
            last = chunk
    return count + (not last.endswith(b"\n"))


class DigestSet:
    """A set of 16-byte digests that takes little more than 16 bytes for each."""

    def __init__(self) -> None:
        self._old = np.zeros(0, "S16")  # sorted
        self._new: set[bytes] = set()

    def add(self, name: str) -> bool:
        """Whether `name` was not there yet; now it is."""
        digest = blake3(name.encode()).digest(16)
        digest = digest[:15] + bytes([digest[15] | 1])  # numpy takes zeros at the end for padding
        at = int(self._old.searchsorted(digest))
        if digest in self._new or (at < len(self._old) and self._old[at] == digest):
            return False
        self._new.add(digest)
        if len(self._new) > max(1 << 14, len(self._old) // 8):
            new = np.array(list(self._new), "S16")
            self._old, self._new = np.sort(np.concatenate((self._old, new))), set()
        return True


class ResultFile:
    """The output, open for appending, and which lines of the input it has. A context manager.

    Raises BatchFileError where another run has it open, where it holds something else than records
    of such a run, or a dry run's beside others'.
    """

    def __init__(self, path: Path, *, dry_run: bool = False) -> None:
        self._file = path.open("ab+")
        try:
            _lock(self._file, path)
            self._finished = array("Q")  # digest of each finished line by number - 1; 0 = open
            self.num_finished = self.num_failed = 0
            _sync_folder(path)
            self._recover(path, dry_run)
        except BaseException:
            self._file.close()
            raise
        self._synced_at = time.monotonic()

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.sync()
        self._file.close()

    def finished(self, number: int) -> int:
        """The digest of the finished line of this number; 0 where it is still open."""
        return self._finished[number - 1] if number <= len(self._finished) else 0

    def finished_bits(self) -> np.ndarray:
        """A bit for each line up to the last finished one, packed into uint8; 1 = finished."""
        return np.packbits(np.array(self._finished, np.uint64) != 0)

    def check_input(self, path: Path, max_bytes: int) -> None:
        """Raises BatchFileError unless every finished line stands in the input as it was."""
        missing = self.num_finished
        for line in read_lines(path, max_bytes):
            if not missing:
                return
            if digest := self.finished(line.number):
                missing -= 1
                if digest != line.digest:
                    raise BatchFileError(
                        f"{self._file.name} holds the result of another line {line.number} than "
                        f"{path} has: give another output, or the input as it was"
                    )
        if missing:
            raise BatchFileError(
                f"{self._file.name} holds results of {missing} lines that {path} does not have"
            )

    def write(self, line: Line, record: bytes, *, failed: bool) -> None:
        """Append one line's record."""
        self._file.write(record)
        self._file.flush()
        self._note(line.number, line.digest, failed)
        if time.monotonic() - self._synced_at > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Have all that was written on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def _note(self, number: int, digest: int, failed: bool) -> None:
        short = number - len(self._finished)
        if short > 0:
            self._finished.frombytes(bytes(8 * short))
        self._finished[number - 1] = digest
        self.num_finished += 1
        self.num_failed += failed

    def _recover(self, path: Path, dry_run: bool) -> None:
        """Note what is there, and cut a torn last line."""
        self._file.seek(0)
        end, torn = 0, False
        for number, text in enumerate(self._file, start=1):
            record = _record(text)
            if torn or (record is None and not _may_be_torn(text)):
                raise BatchFileError(f"{path}, line {number} is no record of a batch run")
            if record is None:
                torn = True
                continue
            if bool(record.get("dry_run")) != dry_run:
                kinds = ("a real run", "a dry run")
                raise BatchFileError(
                    f"{path} holds results of {kinds[not dry_run]}: give {kinds[dry_run]} another "
                    "output"
                )
            end += len(text)
            if self.finished(record["line"]):
                raise BatchFileError(f"{path} holds two results of line {record['line']}")
            self._note(record["line"], int(record["digest"], 16), record["error"] is not None)
        self._file.truncate(end)
        self._file.seek(0, os.SEEK_END)


def _record(text: bytes) -> dict[str, Any] | None:
    """A whole record; None for anything else."""
    if not text.endswith(b"\n"):
        return None
    try:
        found = json.loads(text)
        sound = found["line"] > 0 and 0 < int(found["digest"], 16) < 2**64 and "error" in found
    except (KeyError, TypeError, ValueError):
        return None
    return found if sound else None


def _may_be_torn(text: bytes) -> bool:
    """Whether this can be what is left of a record; a disk may leave zeros in place of its end."""
    left = text.rstrip(b"\0")
    return left.startswith(START[: len(left)])


def _lock(file: Any, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BatchFileError(f"{path} is being written by another run") from None


def _sync_folder(path: Path) -> None:
    """Have the file's name on the disk, too."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
