"""Lines and records at the level of files: every byte of a crash, every kind of line."""

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from purestep.engine.batch_files import DigestSet, Line, ResultFile, count_lines, read_lines
from purestep.engine.batch_records import encoded
from purestep.engine.batch_rows import custom_id_of, read_object, row_of
from purestep.state.errors import BatchFileError, BatchLineError
from tests.engine.batch_fixtures import write_lines


def record_of(number: int, digest: int, error: Any = None) -> bytes:
    return encoded({"line": number, "digest": f"{digest:016x}", "text": "x\n é", "error": error})


@given(
    st.lists(st.binary(max_size=30).map(lambda x: x.replace(b"\n", b"")), max_size=12),
    st.booleans(),
)
@example([b"\xef\xbb\xbfa", b"  ", b"\r", b""], True)
def test_reading_is_splitting(tmp_path_factory: Any, lines: list[bytes], ends: bool) -> None:
    path = tmp_path_factory.mktemp("read") / "in"
    path.write_bytes(b"\n".join(lines) + (b"\n" if ends else b""))
    found = list(read_lines(path, 1000))
    wanted = [(n, x.rstrip(b"\r")) for n, x in enumerate(lines, start=1)]
    wanted = [(n, x.removeprefix(b"\xef\xbb\xbf") if n == 1 else x) for n, x in wanted]
    assert [(x.number, x.raw) for x in found] == [(n, x) for n, x in wanted if x.strip()]
    content = path.read_bytes()
    assert count_lines(path) == content.count(b"\n") + (content[-1:] not in (b"", b"\n"))
    assert all(line.digest for line in found)
    assert [x.digest for x in read_lines(path, 1000)] == [x.digest for x in found]


def test_a_line_longer_than_the_limit_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"short\n" + b"x" * 1000 + b"\nafter\n" + b"y" * 99)
    found = list(read_lines(path, 100))
    assert [(x.number, x.raw) for x in found] == [
        (1, b"short"), (2, None), (3, b"after"), (4, b"y" * 99),
    ]  # fmt: skip
    path.write_bytes(path.read_bytes().replace(b"x" * 1000, b"x" * 999 + b"z"))
    assert next(x for x in read_lines(path, 100) if x.number == 2).digest != found[1].digest


@given(st.integers(0, 400), st.booleans())
def test_whatever_a_crash_leaves_whole_records_are_kept(
    tmp_path_factory: Any, cut: int, zeros: bool
) -> None:
    """The file is cut at any byte, or its end was never written: no whole record is lost, nothing
    else is kept, and writing goes on behind it."""
    path = tmp_path_factory.mktemp("torn") / "out"
    records = [record_of(n, 100 + n, None if n % 2 else "bad") for n in (3, 1, 4)]
    whole = b"".join(records)
    kept = whole[:cut]
    path.write_bytes(kept + (b"\0" * (len(whole) - len(kept)) if zeros else b""))
    with ResultFile(path) as results:
        done = kept.count(b"\n")
        assert results.num_finished == done
        assert [bool(results.finished(n)) for n in (3, 1, 4)] == [n < done for n in range(3)]
        assert results.num_failed == sum(1 for n in (3, 1, 4)[:done] if n % 2 == 0)
        assert results.finished(99) == 0
        results.write(Line(9, 7, b""), record_of(9, 7), failed=False)
    assert path.read_bytes() == b"".join(records[:done]) + record_of(9, 7)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a,b,c\n1,2,3\n", "no record"),
        (b"no newline", "no record"),
        (record_of(1, 5) + b'{"x": 1}\n' + record_of(2, 6), "line 2 is no record"),
        (record_of(1, 5) + record_of(1, 5), "two results of line 1"),
        (record_of(1, 5)[:-20] + b"\n" + record_of(2, 6), "line 2 is no record"),
    ],
)
def test_what_is_no_output_is_left_as_it_is(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "out"
    path.write_bytes(content)
    with pytest.raises(BatchFileError, match=words):
        ResultFile(path)
    assert path.read_bytes() == content


def test_two_runs_never_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with ResultFile(path), pytest.raises(BatchFileError, match="another run"):
        ResultFile(path)
    with ResultFile(path) as results:
        assert results.num_finished == 0


def test_a_changed_line_is_found_before_anything_runs(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in", ["a", "b", "c"])
    digests = [line.digest for line in read_lines(source, 100)]
    with ResultFile(tmp_path / "out") as results:
        results.write(Line(2, digests[1], b""), record_of(2, digests[1]), failed=False)
        results.check_input(source, 100)
        write_lines(source, ["other", "b"])
        results.check_input(source, 100)
        write_lines(source, ["a", "B", "c"])
        with pytest.raises(BatchFileError, match="another line 2"):
            results.check_input(source, 100)
        write_lines(source, ["a"])
        with pytest.raises(BatchFileError, match="1 lines that"):
            results.check_input(source, 100)


def test_digests_tell_names_apart() -> None:
    seen, rng = DigestSet(), random.Random(0)
    names = [str(n) for n in range(40_000)]
    rng.shuffle(names)
    assert all(seen.add(name) for name in names)
    rng.shuffle(names)
    assert not any(seen.add(name) for name in names)
    assert seen.add("new")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=4,
)
WORDS = ["custom_id", "method", "url", "body", "prompt", "images", "adapter", "n", "stop"]
BODY = ["model", "messages", "logit_bias", "top_logprobs", "logprobs", "max_tokens", "tools"]


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(WORDS), JSON), st.dictionaries(st.sampled_from(BODY), JSON))
@example({"prompt": [{"role": "user", "content": [{"type": ["x"]}]}]}, {})
@example({"prompt": [1, {}]}, {})
def test_any_object_is_a_row_or_a_named_error(line: dict[str, Any], body: dict[str, Any]) -> None:
    forms = [line, line | {"body": body}]
    for url in ("/v1/chat/completions", "/v1/completions"):
        named = {"custom_id": "x", "method": "POST", "url": url}
        forms += [named | {"body": body}, named | {"body": {"model": "base"} | body}]
    for given_line in forms:
        with suppress(BatchLineError):
            row = row_of(given_line, ("base",))
            assert row.form in ("chat", "completion", "plain")
            assert isinstance(row.images, list)
            assert row.locality == row_of(given_line, ("base",)).locality
            custom_id_of(given_line)


@given(st.binary(max_size=60))
@example(b'{"a": Infinity}')
@example(b"1" * 5000)
def test_any_bytes_are_an_object_or_a_named_error(raw: bytes) -> None:
    with suppress(BatchLineError):
        assert isinstance(read_object(raw), dict)


def test_records_are_lines_for_every_reader() -> None:
    texts = {"x": "a\u2028b\u2029c\x85d\ne\x1cf", "\u2028": [1]}
    line = encoded(texts)
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == texts
