"""Bytes, stop strings and token tables (SL-01, SL-03)."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import example, given

from purestep.state.request import frozen
from purestep.state.text import TokenTable, decode, find_stop, tellable

stops_of = st.lists(
    st.text(st.sampled_from("abé\U0001f600"), min_size=1, max_size=4), min_size=1, max_size=4
).map(tuple)
pieces_of = st.lists(
    st.text(st.sampled_from("abé\U0001f600"), max_size=3).map(str.encode)
    | st.sampled_from(("é".encode()[:1], "é".encode()[1:], b"\xf0", b"\x9f\x98\x80")),
    max_size=8,
)


def first_end(pieces: list[bytes], stops: tuple[str, ...]) -> tuple[int, int, str] | None:
    """(piece, where it begins, which), by looking at every place of the whole text each time."""
    text = b""
    for number, piece in enumerate(pieces):
        text += piece
        places = [
            (at, -len(stop.encode()), stop)
            for at in range(len(text))
            for stop in stops
            if text[at:].startswith(stop.encode())
        ]
        if places:
            at, _, stop = min(places)
            return number, at, stop
    return None


def fed_one_by_one(pieces: list[bytes], stops: tuple[str, ...]) -> tuple[int, int, str] | None:
    """The same through `find_stop`, as `commit` calls it."""
    text = b""
    for number, piece in enumerate(pieces):
        text, start = text + piece, len(text)
        found = find_stop(text, start, stops)
        if found is not None:
            return number, *found
    return None


@given(pieces_of, stops_of)
@example([b"ab", b"a"], ("ba", "b", "bab"))
@example([b"aa", b"a", b"b"], ("aaab", "aab"))
@example([b"a", b"", b"b"], ("ab",))
@example([b"\xc3", b"\xa9"], ("é",))
@example([b"ab"], ("a", "ab"))
@example([b"ab"], ("ab", "a"))
def test_stop_strings_are_found_as_by_looking_everywhere(
    pieces: list[bytes], stops: tuple[str, ...]
) -> None:
    """The earliest place, there the longest; across token borders, however the text is cut."""
    assert fed_one_by_one(pieces, stops) == first_end(pieces, stops)


@given(st.text(max_size=12), st.text(min_size=1, max_size=3), st.data())
def test_a_stop_is_found_however_its_bytes_are_cut(
    before: str, stop: str, data: st.DataObject
) -> None:
    """SL-01: the text ends just before it, and never inside a character."""
    whole = (before + stop).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)), max_size=6)))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    found = fed_one_by_one(pieces, (stop,))
    assert found is not None
    kept = whole[: found[1]].decode()  # strict: raises if a character were cut
    assert (before + stop).startswith(kept + stop)
    assert (before + stop).index(stop) == len(kept)


def test_no_match_in_what_was_searched_before() -> None:
    """Only what ends behind `start` counts: the caller has dealt with the rest."""
    assert find_stop(b"xab", 3, ("ab",)) is None
    assert find_stop(b"xab", 2, ("ab",)) == (1, "ab")
    assert find_stop(b"", 0, ("ab",)) is None
    assert find_stop(b"xab", 0, ()) is None


@given(st.text(max_size=10), st.data())
def test_text_joins_bytes_before_it_decodes(text: str, data: st.DataObject) -> None:
    """SL-03: a character spread over tokens shows whole; unfinished ones at the end as U+FFFD."""
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=8)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    table = TokenTable(pieces)
    ids = frozen(range(len(pieces)))
    assert table.text(ids) == text
    assert table.join(ids) == raw
    for count in range(len(pieces)):
        assert table.text(ids[:count]) == b"".join(pieces[:count]).decode(errors="replace")


def test_an_unfinished_character_never_raises() -> None:
    table = TokenTable([b"a", b"\xf0\x9f", b"\x98\x80", b"\xff"])
    assert table.text(frozen([0, 1])) == "a\ufffd"
    assert table.text(frozen([0, 1, 2])) == "a\U0001f600"
    assert table.text(frozen([3])) == "\ufffd"
    assert table.text(frozen(())) == ""
    assert decode(b"\xc3") == "\ufffd"


def test_ids_beyond_the_table_add_nothing() -> None:
    """Padded vocabularies have ids the tokenizer does not know."""
    table = TokenTable([b"a", b"b"])
    assert table.text(np.array([0, 2, 1, 10**6])) == "ab"


@given(st.lists(st.binary(max_size=3), max_size=4), st.lists(st.binary(max_size=3), max_size=4))
@example([b"ab", b"c"], [b"a", b"bc"])
@example([b"a"], [b"a", b""])
def test_tables_are_equal_by_content(one: list[bytes], two: list[bytes]) -> None:
    """A table is part of Config, so it must be hashable and compare by value."""
    assert (TokenTable(one) == TokenTable(two)) == (one == two)
    assert hash(TokenTable(one)) == hash(TokenTable(iter(one)))
    assert TokenTable(one) != one


@given(pieces_of, stops_of | st.just(()))
@example([b"\xc3", b"a", b"\xa9"], ())
def test_text_is_told_in_whole_characters_and_never_taken_back(
    parts: list[bytes], stops: tuple[str, ...]
) -> None:
    """SL-01, SL-03: what was told is always a prefix of the final text, which ends before the first
    stop string; no replacement character but where the bytes are no text."""
    text, told, start = b"", "", 0
    for part in parts:
        before, text = len(text), text + part
        found = find_stop(text, before, stops)
        if found is not None:
            text = text[: found[0]]
            break
        end = tellable(text, start, stops)
        assert start <= end <= len(text)
        told, start = told + decode(text[start:end]), end
        assert not any(text[start:].startswith(s.encode()) for s in stops)
    assert decode(text).startswith(told)
    assert told + decode(text[start:]) == decode(text)


def test_half_a_character_is_held_back() -> None:
    smile = "😀".encode()
    assert [tellable(smile[:n], 0, ()) for n in range(5)] == [0, 0, 0, 0, 4]
    assert tellable(b"ab" + smile[:2], 0, ()) == 2
    assert tellable(b"xa", 0, ("ab",)) == 1
    assert tellable(b"xab", 0, ("abc", "bc")) == 1
    assert tellable(b"xac", 0, ("ab",)) == 3
    assert tellable(b"aa", 0, ("aab",)) == 0, "the longest beginning of a stop string counts"
