"""Pictures from the network come in time or not at all; windows hold what they are told to."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.engine.batch import windows
from purestep.engine.batch_files import Line
from purestep.engine.batch_job import BatchJob
from purestep.engine.batch_media import MediaRule, read_media
from purestep.state.errors import BatchLineError


@pytest.fixture
def trickle() -> Iterator[str]:
    """A server that never stops sending, and never says much at a time."""
    stopped = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            head = b"HTTP/1.0 200 OK\r\n"
            self.wfile.write(head if self.path == "/headers" else head + b"\r\n")
            while not stopped.wait(0.05):
                try:
                    self.wfile.write(b"x")
                except OSError:
                    return

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    stopped.set()
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("place", ["headers", "body"])
def test_a_server_that_trickles_is_given_up_in_time(trickle: str, place: str) -> None:
    """Each read is short, all together would never end."""
    rule = MediaRule(folder=Path(), allow_remote=True, timeout_s=0.5)
    start = time.monotonic()
    with pytest.raises(BatchLineError, match=r"not complete after 0\.5 s") as refused:
        read_media(rule, f"{trickle}/{place}")
    assert refused.value.code == "media_fetch_failed"
    assert 0.4 < time.monotonic() - start < 10  # a busy machine; without a deadline it never ends


@given(st.lists(st.integers(0, 9)), st.integers(1, 5), st.integers(1, 20))
def test_a_window_ends_with_the_line_that_fills_it(
    sizes: list[int], count: int, nbytes: int
) -> None:
    """By number or by bytes, and no line is read before it is asked for."""
    job = BatchJob(
        input=Path("in"), output=Path("out"), base_names=(), window=count, window_bytes=nbytes
    )
    read: list[Line] = []

    def lines() -> Iterator[Line]:
        for number, size in enumerate(sizes, start=1):
            read.append(Line(number, 1, b"x" * size if size else None))
            yield read[-1]

    found: list[Line] = []
    for window in windows(job, lines(), lambda line: line):
        held = [len(line.raw or b"") for line in window]
        assert 1 <= len(window) <= count
        assert sum(held[:-1]) < nbytes
        assert read[-1] is window[-1]
        assert window[-1].number == len(sizes) or len(window) == count or sum(held) >= nbytes
        found += window
    assert found == read
    assert len(found) == len(sizes)
