"""Hypothesis strategies for configs, requests and adapters of the simulated device.

The only module here that needs hypothesis (the extra `testing`).
"""

from typing import Any

import hypothesis.strategies as st

from purestep.simulation.media import SIZES
from purestep.simulation.world import NAMES, RANKS, TABLE

PROMPTS = ((1, 3, 4, 5, 1, 3, 5, 6, 3, 3, 0, 1, 4, 5, 6, 7, 10, 0), (1, 3, 4, 5, 0, 0, 0, 0, 1, 1))
prompts = st.builds(
    lambda base, length, last: (*base[: length - 1], last),
    st.sampled_from(PROMPTS),
    st.integers(1, 18),
    st.sampled_from((5, 5, 9)),
)
drawn = {
    "temperature": st.just(0.7),
    "top_k": st.sampled_from((0, 3)),
    "min_p": st.sampled_from((0.0, 0.1)),
    "n": st.sampled_from((1, 1, 3)),
}
common = {
    "seed": st.sampled_from((None, 0, 2**64 - 1)),
    "max_tokens": st.integers(1, 14),
    "stop": st.sampled_from(((), (), ("aba",), ("é", "ab"))),
    "stop_ids": st.sampled_from(((), (), (7, 10))),
    "ignore_eos": st.booleans(),
}
rare = {
    "min_tokens": st.integers(0, 1) | st.integers(0, 3),
    "include_stop": st.booleans(),
    "stream": st.booleans(),
    "logprobs": st.sampled_from((None, 0, 2)),
    "prompt_logprobs": st.sampled_from((None, None, 0, 2)),
    "repetition_penalty": st.sampled_from((1.0, 1.5)),
    "presence_penalty": st.sampled_from((0.0, 0.5)),
    "frequency_penalty": st.sampled_from((0.0, -0.5)),
    "logit_bias": st.sampled_from(((), {3: 2.0, 1: -1.0})),
    "banned_ids": st.sampled_from(((), (5, 4))),
    "allowed_ids": st.sampled_from((None, (1, 3))),
}


def consistent(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that may stand together."""
    fewest = min(fields.get("min_tokens", 0), fields["max_tokens"])
    return {"temperature": 0.0} | fields | {"min_tokens": fewest}


samplings = st.builds(
    consistent,
    st.fixed_dictionaries(common, optional=rare)
    | st.fixed_dictionaries(common | drawn, optional=rare)
    | st.just({"max_tokens": 0, "prompt_logprobs": 1}),
)

words = st.fixed_dictionaries(
    {
        "tokens": prompts,
        "adapter": st.sampled_from((None, *NAMES, *NAMES, "nobody")),
        "salt": st.sampled_from((None, None, "x", "sql")),
        "priority": st.sampled_from((0, 0, -1, 2)),
        "sampling": samplings,
        "hidden_layers": st.sampled_from(((), (), (0,), (1, -1, 0, -2))),
        "embeds": st.none() | st.none() | st.integers(1, 9),
        "media": st.lists(
            st.tuples(
                st.integers(0, len(SIZES) - 1),
                st.integers(0, 14),
                st.sampled_from((0, 0, 1)),
                st.sampled_from((0, 0, 2)),
            ),
            max_size=3,
        ),
    }
)

config_changes = st.fixed_dictionaries(
    {
        "block_size": st.sampled_from((2, 4)),
        "num_blocks": st.integers(4, 14),
        "max_rows": st.integers(1, 4) | st.just(4),
        "max_batched_tokens": st.integers(4, 12),
        "max_active_adapters": st.integers(1, 3),
        "lora_rows": st.sampled_from((16, 24)),
        "prefix_caching": st.sampled_from((True, True, False)),
        "long_prefill_threshold": st.sampled_from((0, 3)),
        "adapter_age_limit": st.sampled_from((0, 3, 12)),
        "adapter_preemption": st.booleans(),
        "adapter_block_quota": st.sampled_from((0, 0, 4)),
        "tokens": st.just(TABLE),
        "max_encoder_tokens": st.sampled_from((0, 9, 20)),
        "encoder_cache_tokens": st.sampled_from((0, 4, 9, 30)),
        "disable_chunked_mm_input": st.sampled_from((False, False, True)),
        "mrope_merge": st.sampled_from((0, 0, 2)),
    }
)
known_adapters = st.fixed_dictionaries(
    {}, optional={name: st.none() | st.sampled_from(sorted(RANKS)) for name in NAMES}
)
names = st.sampled_from(NAMES)
versions = st.sampled_from(sorted(RANKS))
picks = st.integers(0, 11)
