"""A map from blocks to digests is a dict that never changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from purestep.state.digests import PAGE, no_digests
from purestep.state.hashing import DIGEST_BYTES

BLOCKS = st.sampled_from((0, 1, PAGE - 1, PAGE, 5 * PAGE + 3, 5 * PAGE + 4, 9 * PAGE))
# What is done to a block in one draft: it gets a digest, or (0) loses the one it has.
DRAFTS = st.lists(st.lists(st.tuples(BLOCKS, st.integers(0, 3)), max_size=8), max_size=6)


@given(DRAFTS)
def test_drafts_are_dicts_and_what_they_started_from_stays(drafts: list) -> None:
    digests, model, old = no_digests(), {}, []
    for changes in drafts:
        old.append((digests, dict(model)))
        draft = digests.mutate()
        for block, kind in changes:
            if kind:
                draft[block] = model[block] = bytes([kind]) * DIGEST_BYTES
            else:
                assert draft.pop(block) == model.pop(block, None)
            assert draft.get(block) == model.get(block)
        digests = draft.finish()
    for kept, wanted in [*old, (digests, model)]:
        assert list(kept.items()) == sorted(wanted.items())
        assert (len(kept), list(kept)) == (len(wanted), sorted(wanted))
        assert all((b in kept) == (b in wanted) for b in range(10 * PAGE))
        assert set(kept.pages) == {block // PAGE for block in wanted}, "a page without a digest"


def test_a_block_without_a_digest_has_none() -> None:
    with pytest.raises(KeyError):
        no_digests()[3]
    with pytest.raises(ValueError, match="block 3: 2 bytes are no digest"):
        no_digests().mutate()[3] = b"ab"


def test_nothing_done_is_nothing_new() -> None:
    draft = no_digests().mutate()
    draft[4] = b"d" * DIGEST_BYTES
    digests = draft.finish()
    draft = digests.mutate()
    assert draft.pop(5) is None
    assert draft.finish() is digests
