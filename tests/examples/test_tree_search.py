"""The example holds what it says: true logprobs, shared KV, and a wider search finds better."""

from pathlib import Path

import pytest
import torch

from tests.examples.tree_search import PROMPT, search, tiny_program
from tests.models.tiny import make_model


def test_the_search_finds_likely_sequences_on_shared_blocks(tmp_path: Path) -> None:
    program, model = tiny_program(tmp_path), make_model()
    found = {width: search(program, PROMPT, width=width) for width in (1, 4)}
    for best in found.values():
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + best.tokens])).logits[0, len(PROMPT) - 1 : -1]
        scores = logits.log_softmax(-1).gather(1, torch.tensor(best.tokens)[:, None])
        assert best.logprob == pytest.approx(float(scores.sum()), abs=1e-3)
    assert found[4].logprob > found[1].logprob
    alone = -(-(len(PROMPT) + 16) // program.config.block_size)
    assert found[4].most_blocks < 16 * alone * 0.75, "16 beams that shared nothing would take all"
    assert found[4].computed <= len(PROMPT) + 16 * 15, "nothing is computed twice"
    assert search(program, PROMPT, width=4).tokens == found[4].tokens
    assert search(program, PROMPT, width=4, seed=1).tokens != found[4].tokens
