"""The simulation can fail: every deliberate bug is caught, most by the output law alone."""

import pytest

from purestep.simulation.mutants import MUTANTS, applied, caught
from purestep.state.hashing import chain_root

NUM_STEPS, NUM_ALONE = 12000, 1500


@pytest.mark.slow
def test_every_deliberate_bug_is_caught(capsys: pytest.CaptureFixture[str]) -> None:
    found = [
        (bug.name, caught(bug, NUM_ALONE, 7, laws=False), caught(bug, NUM_STEPS, 7, laws=True))
        for bug in MUTANTS
    ]
    with capsys.disabled():
        print(f"\n{'bug':<70} {'without the state laws':<24} with them")
        for name, alone, together in found:
            words = [f"{by[0]} ({by[1]})" if by else "not caught" for by in (alone, together)]
            print(f"{name:<70} {words[0]:<24} {words[1]}")
    assert len(MUTANTS) >= 20
    assert not [name for name, _, together in found if together is None]
    by_output = [name for name, alone, _ in found if alone and alone[0] == "output law"]
    assert len(by_output) >= 12, by_output


def test_a_bug_is_gone_with_its_context() -> None:
    salted = [bug for bug in MUTANTS if bug.name == "the salt is ignored"]
    with applied(salted[0]):
        assert chain_root("m", None, "x") == chain_root("m", None, None)
    assert chain_root("m", None, "x") != chain_root("m", None, None)
