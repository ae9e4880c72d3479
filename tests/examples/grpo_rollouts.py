"""GRPO on a PEFT model whose rollouts the engine makes, in one process, with no disk in between.

In every iteration the engine gets the live adapter tensors, draws a group of answers to each prompt
(`n` samples that share the prompt's KV), and their rewards, normed within the group, weigh the
gradient of PEFT's own logprobs. The engine's logprobs are those of the policy that drew: the ratio
of the two starts at 1. `python -m tests.examples.grpo_rollouts` runs in seconds on a tiny random
model; the reward wants answers full of the 16 lowest tokens.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import LlamaForCausalLM

from purestep.engine import (
    Completion,
    EngineState,
    Program,
    Request,
    SamplingParams,
    init,
    load_adapter_tensors,
    load_program,
    step,
    submit,
)
from tests.examples.live_adapters import tiny_config

PROMPTS = ([5, 17, 33, 2], [9, 9, 4, 50, 12], [61, 3])
GROUP, LENGTH, WANTED = 16, 8, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """What one iteration saw."""

    reward: float  # mean over all answers
    drift: float  # largest difference of a logprob, the engine's against PEFT's, before the update


def main() -> None:
    for number, seen in enumerate(iterations(20)):
        print(f"iteration {number}: reward {seen.reward:.3f}, logprobs differ by {seen.drift:.1e}")


def iterations(count: int) -> Iterator[Iteration]:
    torch.manual_seed(0)
    config = tiny_config()
    config.initializer_range = 0.3  # logits that a reward can make a difference to
    base = LlamaForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        program = load_program(folder, max_rows=GROUP * len(PROMPTS), num_blocks=256, device="cpu")
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = init(program)
    for number in range(count):
        tensors = get_peft_model_state_dict(model)
        state = load_adapter_tensors(state, tensors, model.peft_config["default"], name="policy")
        state, groups = rollouts(program, state, seed=number)
        rewards = {at: [reward(answer) for answer in group] for at, group in groups.items()}
        drift = update(model, optimizer, groups, rewards)
        every = [value for group in rewards.values() for value in group]
        yield Iteration(reward=sum(every) / len(every), drift=drift)


def rollouts(
    program: Program, state: EngineState, seed: int
) -> tuple[EngineState, dict[int, list[Completion]]]:
    """A group of answers to each prompt, by the prompt's place."""
    sampling = SamplingParams(temperature=1.0, n=GROUP, seed=seed, max_tokens=LENGTH)
    for at, prompt in enumerate(PROMPTS):
        state = submit(state, Request(id=f"{at}", tokens=prompt, adapter="policy",
                                      sampling=sampling))  # fmt: skip
    groups: dict[int, list[Completion]] = {at: [] for at in range(len(PROMPTS))}
    while not state.host.idle:
        state, outputs = step(program, state)
        for done in outputs.finished:
            groups[int(done.id)].append(done)
    return state, groups


def reward(answer: Completion) -> float:
    return float((answer.tokens < WANTED).mean())


def update(
    model: PeftModel,
    optimizer: torch.optim.Optimizer,
    groups: dict[int, list[Completion]],
    rewards: dict[int, list[float]],
) -> float:
    """One clipped policy-gradient step; how far the two sides' logprobs were apart."""
    losses, drift = [], 0.0
    for at, answers in groups.items():
        value_G = torch.tensor(rewards[at])
        advantage_G = (value_G - value_G.mean()) / (value_G.std() + 1e-4)
        token_GT = torch.tensor([answer.tokens.tolist() for answer in answers])
        old_GT = torch.tensor([answer.logprobs.tolist() for answer in answers])
        new_GT = logprobs(model, PROMPTS[at], token_GT)
        drift = max(drift, float((new_GT.detach() - old_GT).abs().max()))
        ratio_GT = (new_GT - old_GT).exp()
        gain_GT = ratio_GT * advantage_G[:, None]
        clipped_GT = ratio_GT.clamp(0.8, 1.2) * advantage_G[:, None]
        losses.append(-torch.minimum(gain_GT, clipped_GT).mean())
    torch.stack(losses).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return drift


def logprobs(model: PeftModel, prompt: list[int], token_GT: Tensor) -> Tensor:
    """PEFT's logprob of every drawn token, with gradients."""
    prompt_GP = torch.tensor(prompt).expand(len(token_GT), -1)
    logits_GTV = model(input_ids=torch.cat((prompt_GP, token_GT), 1)).logits
    scores_GTV = logits_GTV[:, len(prompt) - 1 : -1].log_softmax(-1)
    return scores_GTV.gather(2, token_GT[:, :, None])[:, :, 0]


if __name__ == "__main__":
    main()
