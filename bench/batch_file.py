"""How much sooner is a batch file done than by the loop that one writes with transformers and PEFT?

64 chat requests over 8 adapters (rank 8 on all linears) and the base model; one half begin with one
of two long system prompts, the other half share nothing. Both answer greedily with up to 32 tokens
(--requests, --tokens).
Ours is `purestep batch`, from the start of the process with its imports to the end; the loop's time
begins with loading the model and goes through the requests one after another: `set_adapter`, the
chat template, `generate`. Both write a JSONL file, and the texts are compared.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.cpu_generate import TARGETS, checkpoint
from bench.report import Figure, parser, report

SYSTEM = (
    "You are the assistant of a small library. Answer in one or two sentences, kindly and to the "
    "point. The library is open from Tuesday to Saturday, from nine to six. Books may be kept for "
    "four weeks and renewed twice, unless somebody else waits for them. Do not invent titles.",
    "You help children of a primary school with their homework. Never give the result at once: ask "
    "a question that leads to it, in simple words and without long sentences. Praise what is right "
    "before you say what is wrong, and stay with the subject that the child has asked about.",
)
SUBJECTS = ("rivers", "planets", "bread", "bridges", "music", "whales", "glass", "maps")


def main(argv: list[str] | None = None) -> None:
    args = arguments().parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    with tempfile.TemporaryDirectory(prefix="purestep-bench-") as folder:
        report(measure(args, Path(folder)), args.json)


def arguments() -> argparse.ArgumentParser:
    args = parser(__doc__)
    args.add_argument("--model", type=Path, help="checkpoint folder; default: SmolLM2-135M")
    args.add_argument("--threads", type=int, help="default: what torch chooses")
    args.add_argument("--rounds", type=int, default=1)
    args.add_argument("--requests", type=int, default=64)
    args.add_argument("--tokens", type=int, default=32, help="of each answer, at most")
    return args


def measure(args: argparse.Namespace, folder: Path) -> list[Figure]:
    if importlib.util.find_spec("peft") is None:
        print("peft is not installed: batch_file is skipped")
        return []
    count, new, num_adapters = (6, 4, 2) if args.smoke else (args.requests, args.tokens, 8)
    model = tiny_checkpoint(folder) if args.smoke else checkpoint(args, folder)
    adapters = make_adapters(model, folder, num_adapters)
    lines = list(requests(count, new, list(adapters)))
    source = folder / "requests.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    threads = args.threads or torch.get_num_threads()
    mine, theirs = [], []
    for turn in range(args.rounds):
        output = folder / f"results-{turn}.jsonl"
        mine.append(ours(args, model, adapters, source, output, threads))
        print(f"round {turn + 1}: purestep batch {mine[-1]:.1f} s", flush=True)
        start = time.perf_counter()
        texts = loop(model, adapters, lines, folder / "loop.jsonl", threads)
        theirs.append(time.perf_counter() - start)
        print(f"round {turn + 1}: the loop {theirs[-1]:.1f} s", flush=True)
        differ = compare(output, texts)
        print(f"{differ} of {count} texts differ from the loop's", flush=True)
    return [
        Figure(
            figure="batch_file/wall",
            value=sorted(mine)[len(mine) // 2],
            unit="s",
            peer="transformers+peft loop",
            peer_value=sorted(theirs)[len(theirs) // 2],
            lower_is_better=True,
            notes={"requests": count, "adapters": num_adapters, "max_tokens": new,
                   "threads": threads, "differ": differ, "smoke": args.smoke},
        )
    ]  # fmt: skip


def tiny_checkpoint(folder: Path) -> Path:
    """A random model over bytes."""
    from tests.engine.test_generate import byte_tokenizer
    from tests.models.tiny import save_checkpoint

    sizes = {"vocab_size": 257, "max_position_embeddings": 1024, "eos_token_id": 256}
    save_checkpoint(folder / "model", **sizes)
    byte_tokenizer().save_pretrained(folder / "model")
    return folder / "model"


def make_adapters(model: Path, folder: Path, count: int) -> dict[str, Path]:
    """Random adapters, small enough that the model still speaks, as PEFT saves them."""
    from peft import LoraConfig, get_peft_model

    found = {}
    for seed in range(count):
        torch.manual_seed(seed)
        config = LoraConfig(r=8, lora_alpha=1, target_modules=TARGETS, init_lora_weights=False)
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        found[f"a{seed}"] = folder / f"a{seed}"
        get_peft_model(base, config).save_pretrained(found[f"a{seed}"])
    return found


def requests(count: int, new: int, adapters: list[str]) -> Iterator[dict[str, Any]]:
    """Lines of the OpenAI batch format; the base model and the adapters take turns."""
    models = ["base", *adapters]
    for at in range(count):
        question = f"Question {at}: what should I know about {SUBJECTS[at % len(SUBJECTS)]}?"
        messages = [{"role": "user", "content": question}]
        if at % 2:
            messages.insert(0, {"role": "system", "content": SYSTEM[at // 2 % 2]})
        body = {"model": models[at % len(models)], "messages": messages, "max_tokens": new,
                "temperature": 0}  # fmt: skip
        yield {
            "custom_id": f"{at}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": body,
        }


def ours(
    args: argparse.Namespace,
    model: Path,
    adapters: dict[str, Path],
    source: Path,
    output: Path,
    threads: int,
) -> float:
    """Seconds of `purestep batch`, as a process of its own."""
    command = [sys.executable, "-m", "purestep.engine", "batch", str(model), str(source)]
    command += [str(output), "--model-name=base", "--device=cpu", "--dtype=float32"]
    command += [f"--adapter={name}={path}" for name, path in adapters.items()]
    start = time.perf_counter()
    subprocess.run([*command, f"--threads={threads}"], check=True)
    return time.perf_counter() - start


def loop(
    model: Path,
    adapters: dict[str, Path],
    lines: list[dict[str, Any]],
    output: Path,
    threads: int,
) -> dict[str, str]:
    """What one writes without an engine; the text of each request."""
    from peft import PeftModel

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    tokenizer = AutoTokenizer.from_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    wrapped: Any = None
    for name, path in adapters.items():
        if wrapped is None:
            wrapped = PeftModel.from_pretrained(base, path, adapter_name=name).eval()
        else:
            wrapped.load_adapter(path, adapter_name=name)
    texts = {}
    with output.open("w") as file, torch.inference_mode():
        for line in lines:
            body = line["body"]
            ids = tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )["input_ids"]
            options = {"max_new_tokens": body["max_tokens"], "do_sample": False}
            options["attention_mask"] = torch.ones_like(ids)
            if body["model"] == "base":
                with wrapped.disable_adapter():
                    out = wrapped.generate(input_ids=ids, **options)
            else:
                wrapped.set_adapter(body["model"])
                out = wrapped.generate(input_ids=ids, **options)
            text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            texts[line["custom_id"]] = text
            file.write(json.dumps({"custom_id": line["custom_id"], "text": text}) + "\n")
    torch.set_num_threads(before)
    return texts


def compare(output: Path, texts: dict[str, str]) -> int:
    """How many texts differ; every request must have one."""
    said = {}
    for record in map(json.loads, output.read_text().splitlines()):
        if record["error"]:
            raise RuntimeError(f"request {record['custom_id']}: {record['error']}")
        choice = record["response"]["body"]["choices"][0]
        said[record["custom_id"]] = choice["message"]["content"]
    if said.keys() != texts.keys():
        raise RuntimeError(f"{len(said)} results for {len(texts)} requests")
    return sum(said[name] != text for name, text in texts.items())


if __name__ == "__main__":
    main()
