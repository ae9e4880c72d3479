"""Train a LoRA adapter and generate with it in one process, with no file in between.

After every optimizer step the engine gets the live tensors under the same name; what it then says
is compared with PEFT's own greedy answer. `python -m tests.examples.live_adapters` runs it on a
tiny random model in seconds; the loop is the same for a real one.
"""

import tempfile
from collections.abc import Iterator

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from transformers import LlamaConfig, LlamaForCausalLM

from purestep.engine import (
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

PROMPT, TARGET = [5, 17, 33, 2], [7, 7, 9, 9, 11, 11]


def main() -> None:
    for number, said, expected in rollouts(num_steps=12):
        print(f"after step {number}: {said} {'=' if said == expected else '!='} PEFT's")


def rollouts(num_steps: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """(step, the engine's tokens, PEFT's tokens) after each training step towards TARGET."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(tiny_config()).eval()
    with tempfile.TemporaryDirectory() as folder:
        base.save_pretrained(folder)
        program = load_program(folder, max_rows=4, num_blocks=64, device="cpu")
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    state = init(program)
    for number in range(num_steps):
        train_step(model, optimizer)
        state = load_adapter_tensors(
            state,
            get_peft_model_state_dict(model),
            model.peft_config["default"],
            name="policy",
        )
        state, said = rollout(program, state)
        yield number, said, greedy(model)


def tiny_config() -> LlamaConfig:
    return LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        eos_token_id=None,
    )


def train_step(model: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    """One step of cross entropy on TARGET behind PROMPT."""
    ids = torch.tensor([[*PROMPT, *TARGET]])
    labels = torch.tensor([[-100] * len(PROMPT) + TARGET])
    model(input_ids=ids, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def rollout(program: Program, state: EngineState) -> tuple[EngineState, list[int]]:
    """The engine's answer with the adapter as it is now; the old version's KV is never hit."""
    sampling = SamplingParams(temperature=0, max_tokens=len(TARGET))
    state = submit(state, Request(id="r", tokens=PROMPT, adapter="policy", sampling=sampling))
    said: list[int] = []
    while not state.host.idle:
        state, outputs = step(program, state)
        said += outputs.tokens_S.tolist()
    return state, said


@torch.no_grad()
def greedy(model: PeftModel) -> list[int]:
    ids = list(PROMPT)
    for _ in TARGET:
        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(PROMPT) :]


if __name__ == "__main__":
    main()
