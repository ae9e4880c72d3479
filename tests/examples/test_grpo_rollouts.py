"""The example holds what it says: the policies agree before every update, and it learns."""

from tests.examples.grpo_rollouts import iterations


def test_the_reward_grows_and_the_two_sides_agree() -> None:
    seen = list(iterations(15))
    assert all(iteration.drift < 1e-4 for iteration in seen), "the engine drew by other weights"
    first, last = (sum(x.reward for x in part) / 3 for part in (seen[:3], seen[-3:]))
    assert last > first + 0.2
