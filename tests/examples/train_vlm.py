"""Trains the tower and projector in `shapes_vlm/` on pictures of shapes, before a frozen SmolLM2.

First the tower learns what lies in every patch, how many shapes of each colour there are and where;
then tower and projector learn what makes SmolLM2 answer right, the loss on answers alone. Some
steps go through the demo's adapters, which give the same answers in their own form.

    python -m tests.examples.train_vlm            on a GPU, with many cores for the pictures
    python -m tests.examples.train_vlm --help

A run that was stopped goes on from its last checkpoint when it is started again. Time, not steps,
sets the schedule. `evaluate_vlm.py` says what came of it.

B pictures, S their side, P patches, D width of the tower, H that of SmolLM2, T tokens of a chat.
"""

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from purestep.engine.demo_model import cache_root, smollm2_dir
from purestep.models.families import vision_config_from_hf
from purestep.models.llava import LLAVA
from purestep.models.vit import ACTIVATIONS, affine, vit
from tests.examples.shapes import COLORS, COUNTS, KINDS
from tests.examples.train_adapters import ADAPTERS, RECIPES
from tests.examples.train_vlm_data import (
    NOWHERE,
    PATCH_CLASSES,
    PATCHES,
    Chunk,
    Pictures,
    Words,
    chat_encoder,
    collate,
    make_chunk,
)
from tests.examples.vlm import HERE, VISION, llava_config

TOWER_SHARE = 0.18  # of the time, before the language model comes in
TOWER_RATE, JOINT_RATE, PROJECTOR_RATE = 1e-3, 3e-4, 1e-3
WARM_STEPS = 100
HINT = 0.2  # weight of the first stage's loss in the second
EVERY = 10  # one step of so many goes through each adapter
LOOK_SECONDS = 15.0  # between looks at held-out pictures, each with a checkpoint
HEADS = {  # of the first stage, on what the tower says of a patch or of all
    "patch": PATCH_CLASSES,
    "counts": len(COLORS) * (len(COUNTS) + 1),
    "place": NOWHERE + 1,
}

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Language:
    """SmolLM2 as it is, or with an adapter merged in, and how that writes an answer."""

    model: Any
    write: Callable[[str], str]


def main() -> None:
    asked = _arguments()
    device = torch.device(asked.device)
    pictures = Pictures(asked.pictures, asked.workers, device)  # first: it forks
    asked.work.mkdir(parents=True, exist_ok=True)
    run = Run(asked, device, pictures)
    run.train()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(asked.work / VISION, asked.out)
    print(f"the best weights: {asked.out}")


def _arguments() -> argparse.Namespace:
    gpu = torch.cuda.device_count() > 0  # asks the driver alone, so that workers may be forked
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / VISION, help="file of the weights")
    parser.add_argument("--work", type=Path, default=cache_root() / "train-vlm", help="checkpoints")
    parser.add_argument("--minutes", type=float, default=6.4, help="to train for, in all")
    parser.add_argument("--pictures", type=int, default=400_000, help="to draw")
    parser.add_argument("--held-out", type=int, default=512, help="pictures to look at meanwhile")
    parser.add_argument(
        "--workers", type=int, default=max((os.cpu_count() or 2) - 1, 1), help="that draw"
    )
    parser.add_argument("--batch", type=int, default=1024, help="pictures of a step, at first")
    parser.add_argument("--chats", type=int, default=128, help="of a step, later")
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    return parser.parse_args()


class Run:
    """What training changes, and how it goes on."""

    def __init__(self, asked: argparse.Namespace, device: torch.device, pictures: Pictures) -> None:
        torch.manual_seed(0)
        self.asked, self.device, self.pictures = asked, device, pictures
        found = vision_config_from_hf(llava_config(smollm2_dir()))
        assert found is not None
        self.config = found[1]
        self.weights = {
            name: weight.to(device).requires_grad_()
            for name, weight in initial_weights(LLAVA.shapes(self.config)).items()
        }
        width = self.config.tower.hidden_size
        self.heads = {
            name: torch.zeros(size, width, device=device, requires_grad=True)
            for name, size in HEADS.items()
        }
        projector = [w for name, w in self.weights.items() if name.startswith("multi_modal")]
        tower = [w for name, w in self.weights.items() if name.startswith("vision_tower")]
        self.optimizer = torch.optim.AdamW(
            [{"params": [*tower, *self.heads.values()]}, {"params": projector}],
            weight_decay=0.02,
            betas=(0.9, 0.98),
        )
        self.seconds, self.step, self.joint_from, self.best = 0.0, 0, -1, -1.0
        self.source = random.Random(0)
        self.languages = load_languages(device)
        self.encode = chat_encoder(AutoTokenizer.from_pretrained(smollm2_dir()))
        self.held_out = make_chunk(0, asked.held_out, held_out=True)
        self.resume()

    def resume(self) -> None:
        file = self.asked.work / "last.pt"
        if not file.exists():
            return
        saved = torch.load(file, map_location=self.device, weights_only=True)
        with torch.no_grad():
            for mine, theirs in ((self.weights, saved["weights"]), (self.heads, saved["heads"])):
                for name, weight in mine.items():
                    weight.copy_(theirs[name])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.seconds, self.step, self.joint_from, self.best = saved["at"]
        self.source = random.Random(self.step)
        print(f"goes on at step {self.step}, after {self.seconds:.0f} s")

    def save(self) -> None:
        content = {
            "weights": {name: weight.detach() for name, weight in self.weights.items()},
            "heads": {name: weight.detach() for name, weight in self.heads.items()},
            "optimizer": self.optimizer.state_dict(),
            "at": (self.seconds, self.step, self.joint_from, self.best),
        }
        torch.save(content, self.asked.work / "new.pt")
        os.replace(self.asked.work / "new.pt", self.asked.work / "last.pt")

    def train(self) -> None:
        total = 60 * self.asked.minutes
        begun, looked = time.perf_counter() - self.seconds, self.seconds
        while self.seconds < total:
            share = self.seconds / total
            joint = share >= TOWER_SHARE
            if joint and self.joint_from < 0:
                self.look(joint=False)
                self.fit_projector()
                self.joint_from = self.step
            self.set_rates(share)
            loss = self.language_step() if joint else self.tower_step()
            self.step += 1
            self.seconds = time.perf_counter() - begun
            if self.seconds >= total or self.seconds - looked >= LOOK_SECONDS:
                self.look(joint, loss.item())
                self.seconds = looked = time.perf_counter() - begun
                self.save()

    def set_rates(self, share: float) -> None:
        """Each stage warms up and falls in a cosine, to nothing at the end of the second."""
        if self.joint_from < 0:
            rates = (TOWER_RATE * _wave(share / TOWER_SHARE, self.step), 0.0)
        else:
            wave = _wave((share - TOWER_SHARE) / (1 - TOWER_SHARE), self.step - self.joint_from)
            rates = (JOINT_RATE * wave, PROJECTOR_RATE * wave)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def tower_step(self) -> Tensor:
        chosen = self.pictures.sample(self.asked.batch, self.source)
        at = torch.tensor(chosen, device=self.device)
        with self.autocast():
            loss = self.hint(self.states(self.pictures.pixels_BSSC[at]), at)
        return self.update(loss)

    def language_step(self) -> Tensor:
        chosen = self.pictures.sample(self.asked.chats, self.source)
        at = torch.tensor(chosen, device=self.device)
        turn = self.step % EVERY  # 0, 1, ...: the adapters; else SmolLM2 itself
        language = self.languages[turn + 1 if turn + 1 < len(self.languages) else 0]
        chats = [self.encode(self.pictures.chats[i], language.write) for i in chosen]
        with self.autocast():
            states_BPD = self.states(self.pictures.pixels_BSSC[at])
            words = collate(chats, self.device)
            logits_AV = answer_logits(language.model, words, self.rows(states_BPD))
            loss = F.cross_entropy(logits_AV, words.token_A) + HINT * self.hint(states_BPD, at)
        return self.update(loss)

    def update(self, loss: Tensor) -> Tensor:
        loss.backward()
        every = [w for group in self.optimizer.param_groups for w in group["params"]]
        torch.nn.utils.clip_grad_norm_(every, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda")

    def states(self, pixels_BSSC: Tensor) -> Tensor:
        """What the tower says of every patch: [B, P, D]. It is the tower that is served."""
        pixels = pixels_BSSC.permute(0, 3, 1, 2).float() / 127.5 - 1
        params = LLAVA.load_params(self.config, dict(self.weights))
        return vit(params.tower, self.config.tower, pixels)

    def rows(self, states_BPD: Tensor) -> Tensor:
        """As `models/llava.py: features` projects them: [B, P, H]."""
        params = LLAVA.load_params(self.config, dict(self.weights))
        inner = ACTIVATIONS[self.config.activation](affine(states_BPD, params.first))
        return affine(inner, params.second)

    def hint(self, states_BPD: Tensor, at: Tensor) -> Tensor:
        """The first stage's loss on the pictures at these indices."""
        pooled_BD = states_BPD.mean(1)
        patch = F.linear(states_BPD, self.heads["patch"]).flatten(0, 1)
        counts = F.linear(pooled_BD, self.heads["counts"]).unflatten(1, (len(COLORS), -1))
        place = F.linear(pooled_BD, self.heads["place"])
        return (
            F.cross_entropy(patch.float(), self.pictures.patch_BP[at].flatten().long())
            + F.cross_entropy(
                counts.flatten(0, 1).float(), self.pictures.counts_BC[at].flatten().long()
            )
            + F.cross_entropy(place.float(), self.pictures.place_B[at].long())
        )

    @torch.no_grad()
    def fit_projector(self) -> None:
        """Gives its rows the size of SmolLM2's own embeddings."""
        at = torch.tensor(self.pictures.sample(64, self.source), device=self.device)
        rows = self.rows(self.states(self.pictures.pixels_BSSC[at]))
        table = self.languages[0].model.get_input_embeddings().weight.float()
        wanted = table.square().mean().sqrt() / rows.square().mean().sqrt()
        self.weights["multi_modal_projector.linear_2.weight"].mul_(wanted)

    @torch.no_grad()
    def look(self, joint: bool, loss: float | None = None) -> None:
        """Says how many held-out questions are answered right, and keeps the best weights."""
        chunk = self.held_out
        pixels = torch.from_numpy(chunk.pixels_BSSC).to(self.device)
        with self.autocast():
            states = torch.cat([self.states(part) for part in pixels.split(256)])
            right = self.answered(chunk, states) if joint else self.seen(chunk, states)
        said = {"seconds": round(self.seconds), "step": self.step}
        said |= {} if loss is None else {"loss": round(loss, 4)}
        said |= {name: round(share, 3) for name, share in right.items()}
        said["drawn"] = len(self.pictures.chats)
        print(json.dumps(said), flush=True)
        with (self.asked.work / "log.jsonl").open("a") as file:
            file.write(json.dumps(said) + "\n")
        score = sum(right.get(kind, -1.0) for kind in KINDS)
        if score >= self.best:
            self.best = score
            export(self.weights, self.asked.work / VISION)

    def seen(self, chunk: Chunk, states_BPD: Tensor) -> dict[str, float]:
        """The heads' shares of right patches with shapes, pictures' counts and places."""
        pooled_BD = states_BPD.mean(1)
        patch = F.linear(states_BPD, self.heads["patch"]).argmax(-1).cpu()
        counts = F.linear(pooled_BD, self.heads["counts"]).unflatten(1, (len(COLORS), -1))
        place = F.linear(pooled_BD, self.heads["place"]).argmax(-1).cpu()
        wanted = torch.from_numpy(chunk.patch_BP)
        return {
            "patches": (patch == wanted)[wanted > 0].float().mean().item(),
            "counts": (counts.argmax(-1).cpu() == torch.from_numpy(chunk.counts_BC))
            .all(1).float().mean().item(),
            "places": (place == torch.from_numpy(chunk.place_B)).float().mean().item(),
        }  # fmt: skip

    def answered(self, chunk: Chunk, states_BPD: Tensor) -> dict[str, float]:
        """Shares of answers that are right to their end, by kind, "2" for pictures of two groups.

        Where every token is the likeliest after those before it, greedy generation says them."""
        rows_BPH = self.rows(states_BPD)
        groups = (chunk.counts_BC > 0).sum(1)
        asked = [(n, q) for n, chat in enumerate(chunk.chats) for q in chat]
        right: dict[str, list[bool]] = {}
        for start in range(0, len(asked), 256):
            part = asked[start : start + 256]
            language = self.languages[0]
            words = collate([self.encode([q], language.write) for _, q in part], self.device)
            logits_AV = answer_logits(language.model, words, rows_BPH[[n for n, _ in part]])
            wrong = logits_AV.argmax(-1) != words.token_A
            wrong_B = torch.zeros(len(part), dtype=torch.int64, device=self.device)
            wrong_B.index_add_(0, words.row_A, wrong.long())
            for (n, q), errors in zip(part, wrong_B.tolist(), strict=True):
                name = q.kind if groups[n] == 1 else f"{q.kind} 2"
                right.setdefault(name, []).append(errors == 0)
        return {name: sum(values) / len(values) for name, values in sorted(right.items())}


def _wave(share: float, step: int) -> float:
    return min(1.0, (step + 1) / WARM_STEPS) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def initial_weights(shapes: Mapping[str, Sequence[int]]) -> Weights:
    weights: Weights = {}
    for name, shape in shapes.items():
        if name.endswith("bias"):
            weights[name] = torch.zeros(shape)
        elif len(shape) == 1:
            weights[name] = torch.ones(shape)
        else:
            # As large as makes outputs of the inputs' size; what is added up in a tower is smaller.
            scale = 0.02 if "position" in name else math.prod(shape[1:]) ** -0.5
            scale *= 0.3 if name.endswith(("out_proj.weight", "fc2.weight")) else 1.0
            weights[name] = scale * torch.randn(shape)
    return weights


def load_languages(device: torch.device) -> list[Language]:
    """SmolLM2 itself, then with each adapter, all frozen."""
    found = [Language(_load(), lambda answer: answer)]
    for recipe in RECIPES:
        adapted = PeftModel.from_pretrained(_load(), str(ADAPTERS / recipe.name))
        found.append(Language(adapted.merge_and_unload(), recipe.rewrite))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for language in found:
        language.model.requires_grad_(False).to(device, dtype).eval()
    return found


def _load() -> Any:
    return AutoModelForCausalLM.from_pretrained(smollm2_dir(), dtype=torch.float32)


def answer_logits(language: Any, words: Words, rows_BPH: Tensor) -> Tensor:
    """What the language model says at every token of the answers: float32 [A, V].

    Padding stands on the right, where nothing before it sees it, so no mask is needed."""
    embeds_BTH = language.get_input_embeddings()(words.ids_BT)
    embeds_BTH[:, words.rows_at : words.rows_at + PATCHES] = rows_BPH.to(embeds_BTH)
    hidden_BTH = language.model(inputs_embeds=embeds_BTH, use_cache=False).last_hidden_state
    return language.lm_head(hidden_BTH.flatten(0, 1)[words.at_A]).float()


def export(weights: Weights, file: Path) -> None:
    """Tower and projector in bfloat16, by the names that LLaVA's checkpoints on the hub have."""
    stored = {
        name.replace("vision_tower.", "vision_tower.vision_model."): weight.detach().bfloat16()
        for name, weight in weights.items()
    }
    width = weights["vision_tower.embeddings.position_embedding.weight"].shape[1]
    # LLaVA takes what comes before this norm; SigLIP's class wants one all the same.
    norm = "vision_tower.vision_model.post_layernorm"
    stored |= {f"{norm}.weight": torch.ones(width).bfloat16()}
    stored |= {f"{norm}.bias": torch.zeros(width).bfloat16()}
    save_file(stored, file.with_suffix(".new"), metadata={"format": "pt"})
    os.replace(file.with_suffix(".new"), file)


if __name__ == "__main__":
    main()
