"""Where a batch file's images may come from: files below a root, data URLs, the network if allowed.

A relative path counts from the folder of the input file. A file is read only if, with all links
followed, it lies below that folder or below one of the media roots.
"""

import base64
import binascii
import http.client
import threading
import time
import urllib.request
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from purestep.state.errors import BatchLineError

CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRule:
    """What a line may name. Sizes are of the encoded file."""

    folder: Path  # of the input file
    roots: tuple[Path, ...] = ()  # beside it
    allow_remote: bool = False
    max_bytes: int = 20 << 20
    timeout_s: float = 10.0  # for all of a fetch, from its name to its last byte


def read_media(rule: MediaRule, source: str) -> bytes:
    """The bytes that `source` names: a path, or a `file:`, `data:` or http(s) URL.

    Raises BatchLineError: `media_not_found`, `media_forbidden`, `media_too_large`, `media_invalid`
    or `media_fetch_failed`, naming the source, the value and the limit.
    """
    scheme = source[: source.find(":") + 1].lower().removesuffix(":")  # "" without a colon
    if scheme == "data":
        return _read_data(rule, source)
    if scheme in ("http", "https"):
        return _read_remote(rule, source)
    if scheme == "file":
        try:
            parts = urlsplit(source)
        except ValueError as error:
            raise _error("media_invalid", source, f"is no URL: {error}") from None
        if parts.netloc not in ("", "localhost"):
            raise _error("media_forbidden", source, f"is on another host, {parts.netloc!r}")
        return _read_file(rule, unquote(parts.path), source)
    return _read_file(rule, source, source)


def _read_file(rule: MediaRule, path: str, source: str) -> bytes:
    roots = [root.resolve() for root in (rule.folder, *rule.roots)]
    try:
        file = (roots[0] / path).resolve()
        if not any(file.is_relative_to(root) for root in roots):
            allowed = " and ".join(map(str, roots))
            raise _error("media_forbidden", source, f"lies outside {allowed} (see --media-root)")
        if not file.is_file():
            raise _error("media_not_found", source, f"is no file: {file}")
        if (size := file.stat().st_size) > rule.max_bytes:
            raise _too_large(rule, source, f"has {size} bytes")
        return file.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a null byte, a loop of links
        if isinstance(error, BatchLineError):
            raise
        raise _error("media_not_found", source, f"cannot be read: {error}") from None


def _read_data(rule: MediaRule, source: str) -> bytes:
    head, comma, body = source.partition(",")
    if not comma:
        raise _error("media_invalid", source, "is a data URL without a comma")
    if len(body) > rule.max_bytes * 4:  # neither encoding makes more of a byte than 3 characters
        raise _too_large(rule, source, f"has {len(body)} characters")
    try:
        whole = head.lower().endswith(";base64")
        content = base64.b64decode(body, validate=True) if whole else unquote_to_bytes(body)
    except (binascii.Error, ValueError) as error:
        raise _error("media_invalid", source, f"is not base64: {error}") from None
    if len(content) > rule.max_bytes:
        raise _too_large(rule, source, f"has {len(content)} bytes")
    return content


def _read_remote(rule: MediaRule, source: str) -> bytes:
    if not rule.allow_remote:
        raise _error("media_forbidden", source, "is remote (see --allow-remote)")
    deadline = time.monotonic() + rule.timeout_s
    answer: Future[bytes] = Future()

    def fetch() -> None:
        try:
            answer.set_result(_fetched(rule, source, deadline))
        except BaseException as error:  # whoever waits for it raises it
            answer.set_exception(error)

    # In a thread, which is given up in time: names that are looked up, connections that are tried
    # one after another, redirects and headers that trickle have no deadline of their own.
    threading.Thread(target=fetch, daemon=True).start()
    try:
        return answer.result(rule.timeout_s)
    except TimeoutError:
        why = f"cannot be fetched: not complete after {rule.timeout_s} s"
        raise _error("media_fetch_failed", source, why) from None
    except (OSError, ValueError, http.client.HTTPException) as error:  # a space, a foreign protocol
        if isinstance(error, BatchLineError):
            raise
        raise _error("media_fetch_failed", source, f"cannot be fetched: {error}") from None


def _fetched(rule: MediaRule, source: str, deadline: float) -> bytes:
    content = bytearray()
    with _opener().open(source, timeout=rule.timeout_s) as answer:
        while chunk := answer.read1(CHUNK):
            content += chunk
            if len(content) > rule.max_bytes:
                raise _too_large(rule, source, "has more bytes")
            if time.monotonic() > deadline:
                raise TimeoutError
    return bytes(content)


def _opener() -> urllib.request.OpenerDirector:
    """http and https alone, so that no redirect leads to a file or to another protocol."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _too_large(rule: MediaRule, source: str, what: str) -> BatchLineError:
    return _error("media_too_large", source, f"{what}, the limit is {rule.max_bytes}")


def _error(code: str, source: str, what: str) -> BatchLineError:
    shown = source if len(source) <= 80 else source[:77] + "..."
    return BatchLineError(code, f"image {shown!r} {what}")
