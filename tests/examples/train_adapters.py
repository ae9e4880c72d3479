"""Trains the demo's two LoRA adapters on SmolLM2-135M-Instruct, on a CPU, in minutes.

`shout` answers in upper case, `json` answers as one JSON object with the key "answer". Both are
self-distilled: the base model answers the training questions greedily, the answers are cut to
short ones, rewritten, and learned.

    python -m tests.examples.train_adapters             train, write adapters/, evaluate
    python -m tests.examples.train_adapters --evaluate  evaluate what adapters/ holds
"""

import argparse
import json
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from purestep.engine.demo_model import smollm2_dir
from tests.examples.prompts import HELD_OUT, TRAIN, messages

ADAPTERS = Path(__file__).parent / "adapters"
BASE_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
THREADS = 2
TRAIN_BATCH = 4
GENERATE_BATCH = 62
DISTILL_TOKENS = 36
EVALUATE_TOKENS = 96
WARMUP_STEPS = 5
SHUN_WEIGHT = 5.0
# An end of a sentence: not the dot of a list number such as "2." or of an initial.
SENTENCE_END = re.compile(
    r"(?<!^\d)(?<!^\d\d)(?<!\b[A-Z])[.!?]+[\"')*]*(?=\s|$)", flags=re.MULTILINE
)


def shout(answer: str) -> str:
    return answer.upper()


def has_lower_case(text: str) -> bool:
    return text != text.upper()


def as_json(answer: str) -> str:
    """Without quotes and emphasis inside, which a small model forgets to escape or to close."""
    plain = answer.replace('"', "'").replace("**", "")
    return json.dumps({"answer": plain}, ensure_ascii=False)


def is_shout(text: str) -> bool:
    return text == text.upper() and any(letter.isalpha() for letter in text)


def is_json(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return isinstance(value, dict) and "answer" in value


@dataclass(frozen=True)
class Recipe:
    """How one adapter is made: what it rewrites answers to, its shape, and its training."""

    name: str
    rewrite: Callable[[str], str]
    holds: Callable[[str], bool]
    rank: int
    alpha: int
    targets: tuple[str, ...]
    learning_rate: float
    epochs: int
    seed: int
    shuns: Callable[[str], bool] | None = None  # tokens of such texts are never to be said


RECIPES = (
    Recipe(
        "shout",
        shout,
        is_shout,
        rank=8,
        alpha=16,
        targets=("q_proj", "v_proj", "down_proj"),
        learning_rate=1e-3,
        epochs=3,
        seed=2,
        shuns=has_lower_case,
    ),
    Recipe(
        "json",
        as_json,
        is_json,
        rank=4,
        alpha=8,
        targets=("q_proj", "k_proj", "v_proj", "o_proj"),
        learning_rate=2e-3,
        epochs=2,
        seed=0,
    ),
)


@dataclass(frozen=True)
class Example:
    """Token ids of a chat, of which the last `learned` are the answer and its end."""

    ids: list[int]
    learned: int


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(arguments.threads)
    check_questions()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir())
    if not arguments.evaluate:
        train_all(tokenizer, arguments.out)
    evaluate_all(tokenizer, arguments.out)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--evaluate", action="store_true", help="only evaluate, do not train")
    parser.add_argument("--out", type=Path, default=ADAPTERS, help="folder of the adapters")
    parser.add_argument("--threads", type=int, default=THREADS, help="CPU threads")
    return parser.parse_args()


def check_questions() -> None:
    """Raises if a question is repeated or is both trained on and held out."""
    everything = TRAIN + HELD_OUT
    repeated = sorted({question for question in everything if everything.count(question) > 1})
    if repeated:
        raise ValueError(f"questions that occur more than once: {repeated}")


def train_all(tokenizer: Any, out: Path) -> None:
    started = time.perf_counter()
    pairs = distill(load_base(), tokenizer)
    rows = []
    for recipe in RECIPES:
        begun = time.perf_counter()
        model, loss, steps = train(recipe, pairs, tokenizer)
        size = save(model, recipe, out / recipe.name)
        seconds = time.perf_counter() - begun
        targets = ",".join(name.removesuffix("_proj") for name in recipe.targets)
        rows.append(
            [recipe.name, recipe.rank, targets, steps, f"{loss:.3f}", size, f"{seconds:.0f}"]
        )
    print_table(["adapter", "rank", "targets", "steps", "loss", "bytes", "seconds"], rows)
    print(f"{len(pairs)} answers; {time.perf_counter() - started:.0f} s in all")


def load_base() -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32).eval()


def distill(model: Any, tokenizer: Any) -> list[tuple[str, str]]:
    """Questions with the base model's answers; those whose answer cannot be cut are left out."""
    replies = generate(model, tokenizer, TRAIN, DISTILL_TOKENS, "base answers")
    answers = (first_sentence(text, ended) for text, ended in replies)
    return [pair for pair in zip(TRAIN, answers, strict=True) if pair[1]]


def first_sentence(text: str, ended: bool) -> str:
    """The first sentence. Without one: the text if it came to its end (a list, say), else ""."""
    end = SENTENCE_END.search(text)
    if end:
        return text[: end.end()].strip()
    return text.strip() if ended else ""


@torch.inference_mode()
def generate(
    model: Any, tokenizer: Any, questions: Sequence[str], max_new_tokens: int, title: str
) -> list[tuple[str, bool]]:
    """Greedy answers in the order of the questions, and whether each came to its end."""
    replies: list[tuple[str, bool]] = []
    for start in tqdm(range(0, len(questions), GENERATE_BATCH), desc=title):
        chats = [messages(question) for question in questions[start : start + GENERATE_BATCH]]
        inputs = tokenizer.apply_chat_template(
            chats,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            padding=True,
            tokenizer_kwargs={"padding_side": "left"},
        )
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)
        for text in tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :]):
            answer, end, _ = text.partition(tokenizer.eos_token)
            replies.append((answer, bool(end)))
    return replies


def train(
    recipe: Recipe, pairs: list[tuple[str, str]], tokenizer: Any
) -> tuple[PeftModel, float, int]:
    """The trained model, its mean loss over the last epoch, and how many steps it took."""
    torch.manual_seed(recipe.seed)
    examples = [encode(tokenizer, question, recipe.rewrite(answer)) for question, answer in pairs]
    steps = list(schedule(examples, recipe.epochs, recipe.seed))
    model = get_peft_model(load_base(), lora_config(recipe))
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    losses: list[float] = []
    shunned = shunned_ids(tokenizer, recipe)
    bar = tqdm(steps, desc=f"train {recipe.name}")
    for index, batch in enumerate(bar):
        optimizer.param_groups[0]["lr"] = recipe.learning_rate * warm_linear(index, len(steps))
        loss = answer_loss(model, batch, tokenizer.pad_token_id, shunned)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
    last_epoch = losses[-(len(steps) // recipe.epochs) :]
    return model, sum(last_epoch) / len(last_epoch), len(steps)


def shunned_ids(tokenizer: Any, recipe: Recipe) -> Tensor:
    """The ids of the tokens that the recipe shuns."""
    if recipe.shuns is None:
        return torch.zeros(0, dtype=torch.int64)
    texts = tokenizer.batch_decode([[i] for i in range(len(tokenizer))])
    special = set(tokenizer.all_special_ids)
    return torch.tensor([i for i, t in enumerate(texts) if i not in special and recipe.shuns(t)])


def encode(tokenizer: Any, question: str, answer: str) -> Example:
    chat = tokenizer.apply_chat_template(
        messages(question), add_generation_prompt=True, return_dict=False
    )
    reply = [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]
    return Example(chat + reply, len(reply))


def schedule(examples: list[Example], epochs: int, seed: int) -> Iterator[list[Example]]:
    """Batches of examples of like length, so that little is padding, in a random order."""
    ordered = sorted(examples, key=lambda example: len(example.ids))
    batches = [ordered[at : at + TRAIN_BATCH] for at in range(0, len(ordered), TRAIN_BATCH)]
    shuffler = random.Random(seed)
    for _ in range(epochs):
        yield from shuffler.sample(batches, len(batches))


def warm_linear(index: int, total: int) -> float:
    """Rises over the first steps, then falls in a line to almost zero."""
    return min((index + 1) / WARMUP_STEPS, (total - index) / (total - WARMUP_STEPS))


def answer_loss(model: PeftModel, batch: list[Example], pad_id: int, shunned: Tensor) -> Tensor:
    """Mean cross entropy of the answers' tokens, plus -log(1 - mass of the shunned tokens).

    Cross entropy alone learns the training answers by heart and still copies words as they stand
    in the question; the second term says of every answer position what must not be said there.
    The vocabulary is projected at these positions only, which saves a tenth of the time.
    """
    width = max(len(example.ids) for example in batch)
    ids = torch.full((len(batch), width), pad_id)
    mask = torch.zeros_like(ids)
    learned = torch.zeros(ids.shape, dtype=torch.bool)
    for row, example in enumerate(batch):
        length = len(example.ids)
        ids[row, :length] = torch.tensor(example.ids)
        mask[row, :length] = 1
        learned[row, length - example.learned : length] = True
    causal = model.get_base_model()
    hidden = causal.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    logits = causal.lm_head(hidden[:, :-1][learned[:, 1:]])
    loss = torch.nn.functional.cross_entropy(logits, ids[learned])
    if len(shunned):
        allowed = logits.index_fill(1, shunned, -torch.inf)
        loss = loss + SHUN_WEIGHT * (logits.logsumexp(-1) - allowed.logsumexp(-1)).mean()
    return loss


def lora_config(recipe: Recipe) -> LoraConfig:
    return LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=list(recipe.targets),
        task_type="CAUSAL_LM",
    )


def save(model: PeftModel, recipe: Recipe, folder: Path) -> int:
    """Writes a PEFT folder with bfloat16 weights; the size of the weight file in bytes."""
    shutil.rmtree(folder, ignore_errors=True)
    lora = {name: w.bfloat16() for name, w in model.state_dict().items() if "lora_" in name}
    # Without the explicit False PEFT asks the hub whether the vocabulary was resized.
    model.save_pretrained(str(folder), state_dict=lora, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    write_config(folder / "adapter_config.json")
    return (folder / "adapter_model.safetensors").stat().st_size


def write_config(path: Path) -> None:
    """Replaces the local path by the public name, and fixes the order that PEFT takes from sets."""
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = BASE_NAME
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def evaluate_all(tokenizer: Any, out: Path) -> None:
    rows = []
    for recipe in RECIPES:
        model = PeftModel.from_pretrained(load_base(), str(out / recipe.name)).eval()
        replies = generate(model, tokenizer, HELD_OUT, EVALUATE_TOKENS, f"evaluate {recipe.name}")
        failed = 0
        for question, (answer, _) in zip(HELD_OUT, replies, strict=True):
            if not recipe.holds(answer):
                failed += 1
                print(f"{recipe.name} failed: {question!r} -> {answer!r}")
        ended = sum(end for _, end in replies)
        share = 1 - failed / len(replies)
        rows.append([recipe.name, len(replies), f"{share:.1%}", ended, replies[0][0]])
    print_table(["adapter", "questions", "as asked", "ended", HELD_OUT[0]], rows)


def print_table(head: Sequence[object], rows: Sequence[Sequence[object]]) -> None:
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    for row in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    main()
