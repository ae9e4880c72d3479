"""Block identity and noise streams (multi_lora.md, 12.1, 12.2, 21: 16, 20; PC-01, PC-09, DT-03)."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import example, given

from purestep.state.hashing import (
    DIGEST_BYTES,
    block_digests,
    chain_root,
    framed,
    random_stream,
    request_seed,
)

short = st.text(st.sampled_from("abfr0\0é"), max_size=3)
maybe = st.none() | short
seeds = st.integers(0, 2**64 - 1)


@given(
    st.lists(st.binary(max_size=12), min_size=1, max_size=4),
    st.lists(st.binary(max_size=12), min_size=1, max_size=4),
)
@example([b"ab", b"c"], [b"a", b"bc"])
@example([b""], [b"", b""])
def test_framing_is_injective(one: list[bytes], two: list[bytes]) -> None:
    """("ab", "c") is not ("a", "bc"), and no part can imitate the length of another."""
    assert (framed("t", *one) == framed("t", *two)) == (one == two)


@given(short, st.lists(st.binary(max_size=9), max_size=3), short)
def test_tags_and_parts_are_apart(tag: str, parts: list[bytes], other: str) -> None:
    assert (framed(tag, *parts) == framed(other, *parts)) == (tag == other)
    assert framed(tag, *parts, b"") != framed(tag, *parts)


@given(st.tuples(short, maybe, maybe), st.tuples(short, maybe, maybe))
@example(("m", None, "fr"), ("m", "fr", None))
@example(("m", "fr", None), ("m", "fr", ""))
@example(("m", None, None), ("m", "", None))
@example(("m", "ab", "c"), ("m", "a", "bc"))
@example(("ma", "b", None), ("m", "ab", None))
def test_roots_are_equal_only_for_equal_model_version_and_salt(
    one: tuple[str, str | None, str | None], two: tuple[str, str | None, str | None]
) -> None:
    """12.2: a salt is never an adapter; None differs from the empty string."""
    assert (chain_root(*one) == chain_root(*two)) == (one == two)


keys = st.tuples(
    st.sampled_from((None, "fr", "de")),
    st.sampled_from((None, "fr", "u1")),
    st.lists(st.sampled_from((0, 1, 256, 2**31 - 1)), max_size=9).map(tuple),
)


@given(keys, keys, st.integers(1, 4))
@example((None, "fr", (1,) * 4), ("fr", None, (1,) * 4), 4)
@example((None, None, (1, 256)), (None, None, (256, 1)), 2)
def test_equal_keys_iff_equal_version_salt_and_tokens_up_to_the_block_end(
    one: tuple[str | None, str | None, tuple[int, ...]],
    two: tuple[str | None, str | None, tuple[int, ...]],
    block_size: int,
) -> None:
    """21: 16. A later block's digest tells its whole prefix; a partial block has none."""
    digests = []
    for version, salt, tokens in (one, two):
        root = chain_root("model", version, salt)
        digests.append(block_digests(root, np.array(tokens, np.int32), block_size))
        assert len(digests[-1]) == len(tokens) // block_size
        assert all(len(d) == DIGEST_BYTES for d in digests[-1])
        assert len(set(digests[-1])) == len(digests[-1])
    for i, a in enumerate(digests[0]):
        for j, b in enumerate(digests[1]):
            ends = (i + 1) * block_size, (j + 1) * block_size
            same = one[:2] == two[:2] and one[2][: ends[0]] == two[2][: ends[1]]
            assert (a == b) == same


@given(st.lists(st.integers(0, 9), min_size=6, max_size=20), st.integers(1, 5), st.data())
def test_a_chain_may_be_continued_anywhere(
    tokens: list[int], block_size: int, data: st.DataObject
) -> None:
    """What `commit` appends block by block is what `submit` computes at once."""
    array, root = np.array(tokens, np.int32), chain_root("m", None, None)
    whole = block_digests(root, array, block_size)
    cut = data.draw(st.integers(0, len(whole)))
    front = block_digests(root, array[: cut * block_size], block_size)
    back = block_digests((front or (root,))[-1], array[cut * block_size :], block_size)
    assert front + back == whole


def test_digests_do_not_depend_on_the_arrays_type() -> None:
    root, tokens = chain_root("m", None, None), [1, 2, 3, 300]
    kinds = (np.int32, np.int64, np.uint16, ">i4")
    assert len({block_digests(root, np.array(tokens, kind), 2) for kind in kinds}) == 1
    spaced = np.repeat(np.array(tokens, np.int32), 2)[::2]
    assert block_digests(root, spaced, 2) == block_digests(root, np.array(tokens, np.int32), 2)


def test_the_hash_is_the_cryptographic_one() -> None:
    """PC-09: it cannot be weakened silently. Hand-made bytes, so that the format is pinned."""

    def field(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    adapter, salt = field(b"lora") + field(b"v"), field(b"unsalted")
    root = blake3(b"".join(map(field, (b"purestep/kv/1", b"m", adapter, salt)))).digest()
    assert chain_root("m", "v", None) == root
    base, salt = field(b"base"), field(b"salt") + field(b"v")
    salted = blake3(b"".join(map(field, (b"purestep/kv/1", b"m", base, salt)))).digest()
    assert chain_root("m", None, "v") == salted
    block = blake3(root + field(b"tokens") + field(bytes((1, 0, 0, 0, 2, 1, 0, 0)))).digest()
    assert block_digests(root, np.array([1, 258]), 2) == (block,)


paths = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 3), max_size=4).map(tuple)


@given(st.tuples(seeds, st.integers(0, 5), paths), st.tuples(seeds, st.integers(0, 5), paths))
@example((0, 0, ()), (2**64 - 1, 0, ()))
@example((0, 1, ()), (1, 0, ()))
@example((0, 1, ()), (0, 0, (1,)))
@example((0, 0, (1, 0)), (0, 0, (1,)))
@example((0, 0, (1,)), (0, 0, (256,)))
def test_streams_are_equal_only_for_equal_seed_sample_and_path(
    one: tuple[int, int, tuple[int, ...]], two: tuple[int, int, tuple[int, ...]]
) -> None:
    assert 0 <= random_stream(*one) < 2**64
    assert (random_stream(*one) == random_stream(*two)) == (one == two)


@given(st.tuples(seeds, short), st.tuples(seeds, short))
@example((0, "a"), (2**64 - 1, "a"))
def test_derived_seeds_differ_by_engine_and_request(
    one: tuple[int, str], two: tuple[int, str]
) -> None:
    assert 0 <= request_seed(*one) < 2**64
    assert (request_seed(*one) == request_seed(*two)) == (one == two)


@pytest.mark.parametrize("call", [lambda s: random_stream(s, 0, ()), lambda s: request_seed(s, "")])
@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_beyond_64_bit_are_refused_not_wrapped(call: Callable[[int], int], seed: int) -> None:
    with pytest.raises(OverflowError):
        call(seed)


PRINT_KEYS = """
import numpy as np
from purestep.state.hashing import *
root = chain_root("m", "fr", "u1")
print(root.hex(), [d.hex() for d in block_digests(root, np.arange(40, dtype=np.int32), 16)])
print(random_stream(2**64 - 1, 3, (1, 2)), request_seed(7, "req"))
"""


def test_keys_are_equal_in_processes_with_other_hash_seeds() -> None:
    """PC-09: nothing of Python's own hash gets into a key."""
    printed = set()
    for seed in ("0", "1", "random"):
        printed.add(
            subprocess.run(
                [sys.executable, "-c", PRINT_KEYS],
                env={**os.environ, "PYTHONHASHSEED": seed},
                cwd=Path(__file__).parents[2],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
    assert len(printed) == 1
    root = chain_root("m", "fr", "u1")
    assert printed.pop().startswith(root.hex())
