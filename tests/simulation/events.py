"""Random configs and events of a numpy Generator, for runs longer than Hypothesis makes."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from purestep.simulation.machine import Event, Machine
from purestep.simulation.media import SIZES
from purestep.simulation.world import NAMES, RANKS

PROMPTS = (
    (1, 3, 4, 5, 1, 3, 5, 6, 3, 3, 0, 1, 4, 5, 6, 7, 10, 0),
    (1, 3, 4, 5, 0, 0, 0, 0, 1, 1, 0, 1, 4, 5, 6, 7, 10, 0),
    (4, 4, 1, 5, 1, 3, 5, 6, 3, 3),
)
MOST_LIVE = 12
LEAST_OF_ONE_DRIVER = 40  # events
WEIGHTS = {  # of 1000 events
    "step": 570,
    "submit": 170,
    "branch": 35,
    "abort": 25,
    "load": 20,
    "load_returns": 55,
    "load_fails": 30,
    "register": 25,
    "unload": 14,
    "pin": 10,
    "fail": 20,
    "restore": 4,
    "fork": 3,
    "flush": 2,
    "adopt": 2,
    "lose": 5,
    "spoil": 5,
    "misfit": 5,
}
DELICATE = {  # likewise, while a branch waits for its copy, and behind a step that failed
    "step": 380,
    "abort": 300,
    "fail": 150,
    "submit": 100,
    "branch": 50,
    "restore": 20,
}
MEDIA: tuple[dict[str, Any], ...] = (  # of five configs in seven
    {},
    {},
    {"max_encoder_tokens": 15, "encoder_cache_tokens": 30},
    {"max_encoder_tokens": 10, "encoder_cache_tokens": 10, "mrope_merge": 2},
    {"max_encoder_tokens": 9, "encoder_cache_tokens": 4},
    {"max_encoder_tokens": 4, "encoder_cache_tokens": 4},
    {
        "max_encoder_tokens": 9,
        "encoder_cache_tokens": 12,
        "disable_chunked_mm_input": True,
        "long_prefill_threshold": 0,
    },
)
ROOMY = {"num_blocks": 30, "max_batched_tokens": 20, "max_rows": 5}  # other limits are met first
ALIKE = (((4, 7, 0, 0),), ((3, 1, 0, 0), (4, 8, 0, 0)))  # items that many requests have in common
CONFUSABLE = (  # pairs of items that differ in one respect, and fit into a block or two
    (((2, 2, 0, 0),), ((8, 2, 0, 0),)),  # the picture
    (((0, 2, 0, 0), (0, 3, 0, 0)), ((0, 2, 0, 0), (5, 3, 0, 0))),  # the second picture
    (((1, 1, 1, 0),), ((1, 1, 0, 2),)),  # the places without a row
    (((2, 2, 0, 0),), ((2, 3, 0, 0),)),  # where it begins
)
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {},
    {"temperature": 0.7},
    {"temperature": 0.7, "top_k": 3, "n": 3},
    {"stop_ids": (7, 10)},
    {"stop": ("é", "ab"), "stream": True},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"min_tokens": 1, "repetition_penalty": 1.5, "banned_ids": (5, 4)},
    {"temperature": 0.7, "frequency_penalty": -0.5, "logit_bias": ((3, 2.0), (1, -1.0))},
)


def pick(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def random_config(rng: np.random.Generator) -> dict[str, Any]:
    """What a config has other than `world.DEFAULTS`."""
    num_blocks = int(rng.integers(7, 15))
    return {
        "block_size": pick(rng, (1, 2, 4, 4)),
        "num_blocks": num_blocks,
        "adapter_block_quota": pick(rng, (0, 0, max(6, num_blocks // 2))),
        "max_rows": pick(rng, (2, 3, 4, 5)),
        "max_batched_tokens": int(rng.integers(5, 15)),
        "max_active_adapters": int(rng.integers(1, 4)),
        "lora_rows": pick(rng, (16, 24)),
        "prefix_caching": pick(rng, (True, True, True, False)),
        "long_prefill_threshold": pick(rng, (0, 3)),
        "adapter_age_limit": pick(rng, (0, 3, 12)),
        "adapter_preemption": pick(rng, (False, True)),
        **pick(rng, MEDIA),
        **pick(rng, ({}, {}, ROOMY)),
    }


def first_events(rng: np.random.Generator) -> list[Event]:
    """Adapters to begin with: all known, some or all loaded."""
    events: list[Event] = [("register", {"name": name}) for name in NAMES]
    for name in NAMES[: pick(rng, (1, len(NAMES)))]:
        events.append(("load", {"name": name, "version": pick(rng, tuple(RANKS)), "again": True}))
    return events


def random_event(rng: np.random.Generator, machine: Machine) -> Event:
    """What happens next."""
    host = machine.state.host
    delicate = host.copies or machine.last == "fail"
    kind = _telling(rng, machine) or _drawn(rng, DELICATE if delicate else WEIGHTS)
    if kind == "submit" and machine.last == "abort" and machine.aborted and host.in_flight:
        return kind, {**random_request(rng, machine.number), "id": machine.aborted}
    crowded = len(machine.live) >= MOST_LIVE and kind in ("submit", "branch")
    vain = kind in ("load_returns", "load_fails") and not machine.asked
    if crowded or vain or kind == "step":
        return _driver(rng, machine), {}
    return kind, _arguments(rng, machine, kind)


def _telling(rng: np.random.Generator, machine: Machine) -> str | None:
    """A kind of event that says more than others where things stand as they do, now and then."""
    host = machine.state.host
    number = int(rng.integers(24))
    flying = host.in_flight[0] if host.in_flight else None
    if flying is not None and (flying.uploads or flying.ended or flying.loads) and number < 3:
        return "lose"
    if flying is not None and machine.last == "abort" and number < 18:
        if number < 12:  # of the same name
            return "submit"
        return "misfit" if flying.encodes else "spoil"  # also of rows that left in flight
    if machine.last == "submit":
        named_again = flying is not None and machine.aborted in machine.live
        if named_again or number < 12:  # one comes seldom alone
            return "ahead" if named_again else "submit"
    if host.adapters.reservations and number < 4:
        return "submit"
    if flying is not None and flying.encodes and number in (4, 5):
        return "misfit"
    if flying is None and host.blocks.num_free < len(host.rows.ids) and 18 <= number < 21:
        return "fail"  # a step that takes blocks from some rows for others
    if host.encoder.holders and number >= 21:  # a row stands within an item
        return "adopt" if flying is None and number < 23 else "spoil"
    return None


def _driver(rng: np.random.Generator, machine: Machine) -> str:
    """Which kind of step: for a while none is planned ahead, for a while most are."""
    ahead = machine.number // LEAST_OF_ONE_DRIVER % 3 > 0
    return "ahead" if ahead and rng.integers(12) else "step"


def _drawn(rng: np.random.Generator, weights: dict[str, int]) -> str:
    number = int(rng.integers(1000))
    for kind, weight in weights.items():
        number -= weight
        if number < 0:
            return kind
    raise ValueError(f"weights add up to {1000 - number}, not to 1000")


def _arguments(rng: np.random.Generator, machine: Machine, kind: str) -> dict[str, Any]:
    match kind:
        case "submit":
            media = machine.config.max_encoder_tokens > 0
            words = random_request(rng, machine.number, media)
            promises = machine.state.host.adapters.reservations
            if promises and rng.integers(2):  # for whose place is promised, before all others
                victims = {version for promise in promises for version in promise.victims}
                names = sorted(n for n, version in machine.bound.items() if version in victims)
                return {**words, "adapter": pick(rng, names or NAMES), "priority": -1}
            return {**words, **_alike(rng, machine)} if media and rng.integers(2) else words
        case "abort" | "load_fails" | "spoil" | "misfit":
            return {"pick": int(rng.integers(12))}
        case "branch":
            return {"pick": int(rng.integers(12)), "count": pick(rng, (1, 1, 2))}
        case "load_returns":
            return {"pick": int(rng.integers(12)), "version": pick(rng, tuple(RANKS))}
        case "load":
            found = {"version": pick(rng, tuple(RANKS)), "again": bool(rng.integers(4))}
            return {"name": pick(rng, NAMES), **found}
        case "unload":
            running = pick(rng, ("drain", "drain", "abort", "refuse"))
            return {"name": pick(rng, NAMES), "running": running}
        case "lose":
            return {"behind": bool(rng.integers(2))}
        case "register" | "pin":
            return {"name": pick(rng, NAMES)}
        case "fork":
            roomy = machine.config.num_blocks >= 15
            return {"num_blocks": int(rng.integers(20, 36) if roomy else rng.integers(7, 15))}
        case "adopt":
            return {"weights": f"weights {machine.number}"}
    return {}


def random_request(rng: np.random.Generator, number: int, media: bool = False) -> dict[str, Any]:
    """The words of a request that nobody has submitted yet, perhaps with `media`."""
    length, max_tokens = int(rng.integers(1, 19)), int(rng.integers(1, 15))
    last = pick(rng, (5, 5, 9))
    scored = int(rng.integers(40)) == 0
    sampling = {"prompt_logprobs": 1} if scored else pick(rng, SAMPLINGS)
    return {
        "id": f"r{number}",
        "tokens": (*pick(rng, PROMPTS)[: length - 1], last),
        "media": random_items(rng) if media else (),
        "embeds": int(rng.integers(1, 10)) if rng.integers(8) == 0 else None,
        "adapter": pick(rng, (None, *NAMES, *NAMES)),
        "salt": pick(rng, (None, None, None, "x", "sql")),
        "priority": pick(rng, (0, 0, -1, 2)),
        "hidden_layers": (0, -1) if rng.integers(16) == 0 else (),
        "sampling": {
            "temperature": 0.0,
            **sampling,
            "max_tokens": 0 if scored else max_tokens,
            "ignore_eos": bool(rng.integers(2)),
        },
    }


def _alike(rng: np.random.Generator, machine: Machine) -> dict[str, Any]:
    """A prompt that ends soon behind an item, the same for many, so that hits end inside it; or one
    that is taken for another, of the same time, if a key leaves anything out."""
    if rng.integers(3) == 0:
        words = {"tokens": (*PROMPTS[0][: pick(rng, (16, 17))], 5), "media": pick(rng, ALIKE)}
    else:
        pair = CONFUSABLE[machine.number // LEAST_OF_ONE_DRIVER % len(CONFUSABLE)]
        words = {"tokens": (*PROMPTS[0][:8], 5), "media": pick(rng, pair)}
    if rng.integers(4) == 0:  # none of it is found, all of it is computed
        words["sampling"] = {"temperature": 0.0, "prompt_logprobs": 1, "max_tokens": 3}
    return {**words, "embeds": None, "adapter": pick(rng, (None, NAMES[0])), "salt": None}


def random_items(rng: np.random.Generator) -> tuple[tuple[int, int, int, int], ...]:
    """Up to three items anywhere, often where others had the same."""
    if rng.integers(3) == 0:
        return ()
    return tuple(
        (
            int(rng.integers(len(SIZES))),
            pick(rng, (0, 1, 2, 3, 4, 5, 7, 8, 11)),
            pick(rng, (0, 0, 0, 1)),
            pick(rng, (0, 0, 0, 2)),
        )
        for _ in range(pick(rng, (1, 1, 2, 3)))
    )
