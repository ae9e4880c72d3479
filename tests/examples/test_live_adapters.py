"""The example holds what it says: no disk, PEFT's tokens after every step, and it learns."""

from tests.examples.live_adapters import TARGET, rollouts


def test_every_rollout_equals_peft_and_training_shows() -> None:
    answers = list(rollouts(num_steps=40))
    for number, said, expected in answers:
        assert said == expected, f"after step {number}"
    assert len({tuple(said) for _, said, _ in answers}) > 1, "the adapter never changed"
    assert TARGET in [said for _, said, _ in answers], "40 steps did not teach the target"
