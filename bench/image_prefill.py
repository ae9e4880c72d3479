"""What does an image cost before the first token, and what do other requests wait for it?

Random models of two families, LLaVA (a CLIP tower of 577 tokens) and Qwen2-VL (400 rows an image),
on the CPU in float32 and, where there is a GPU, on that in bfloat16, beside transformers' own
models and image processors on the same pictures. Every figure is in milliseconds:

* `encode`: one image through tower and projector.
* `processor`: from a PIL image to a request, with an empty cache, and `processor_cached` with one
  that knows the picture; the peer is transformers' image processor alone.
* `first_token`: from a PIL image to the first token, for a picture that nobody has seen. For
  `first_token_known` it is cached as pixels and as encoder output, but the text before it is new;
  for `first_token_same` the whole prompt was asked before. The peer computes everything each time.
* `stall`: the longest step of rows that decode while a prompt with three new images comes in, of
  which a step encodes one; `decode` is their median step without it. Their peer is the time in
  which transformers answers that prompt: one after another, all others wait for it.

Before anything is timed the first tokens are compared with transformers'.
"""

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PretrainedConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from bench.report import Figure, parser, report
from purestep.engine import (
    EngineState,
    Program,
    Request,
    SamplingParams,
    empty_processor_cache,
    init,
    load_program,
    prepare_cached,
    step,
    submit,
)
from tests.engine.tiny_images import ascii_tokenizer
from tests.models.tiny_vision import picture

PEER = "transformers"
CASES = {  # by our figure's name, whether transformers does the same work
    "encode": True,
    "processor": True,
    "processor_cached": True,
    "first_token": True,
    "first_token_known": True,
    "first_token_same": True,
    "decode": False,
    "stall": True,
}
MARKER = 126


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    width: int = 384  # of tower and language model
    inner: int = 1536
    tower_layers: int = 12
    layers: int = 8
    side: int = 336  # of LLaVA's images
    pixels: int = 560 * 560  # of Qwen2-VL's
    photo: tuple[int, int] = (1280, 960)
    text: int = 48  # letters before an image
    rows: int = 4  # that decode
    steps: int = 30


TINY = Sizes(
    width=32, inner=64, tower_layers=2, layers=2, side=56, pixels=112 * 112, photo=(64, 48), steps=6
)


def main(argv: list[str] | None = None) -> None:
    args = parser(__doc__)
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--threads", type=int, help="default: what torch chooses")
    args.add_argument(
        "--devices", nargs="+", choices=["cpu", "cuda"], help="default: all there are"
    )
    args = args.parse_args(argv)
    warnings.filterwarnings("ignore", category=FutureWarning)
    threads = torch.get_num_threads()
    torch.set_num_threads(args.threads or threads)
    devices = args.devices or (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    sizes, figures = TINY if args.smoke else Sizes(), []
    with tempfile.TemporaryDirectory(prefix="purestep-bench-") as folder:
        for family, make in (("llava", llava), ("qwen2_vl", qwen2_vl)):
            path = Path(folder) / family
            make(sizes, path)
            for device in devices:
                runs = Contest(path, device, sizes).run(args.rounds)
                figures += figures_of(family, device, runs, args)
    torch.set_num_threads(threads)
    report(figures, args.json)


def figures_of(
    family: str, device: str, runs: dict[str, list[float]], args: argparse.Namespace
) -> list[Figure]:
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    notes = {"device": where, "threads": torch.get_num_threads(), "smoke": args.smoke}
    return [
        Figure(
            figure=f"image_prefill/{case}/{family}/{device}",
            value=median(runs[case]),
            unit="ms",
            peer=PEER if has_peer else None,
            peer_value=median(runs[f"{PEER}/{case}"]) if has_peer else None,
            lower_is_better=True,
            notes=notes | {"worst": max(runs[case])},
        )
        for case, has_peer in CASES.items()
    ]


def text_sizes(sizes: Sizes) -> dict[str, Any]:
    heads = max(sizes.width // 64, 4)
    return {
        "vocab_size": 1024,
        "hidden_size": sizes.width,
        "intermediate_size": sizes.inner,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
    }


def llava(sizes: Sizes, folder: Path) -> None:
    """A random LLaVA-1.5, shaped as CLIP-L is but for its width."""
    tower = CLIPVisionConfig(
        hidden_size=sizes.width,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.tower_layers,
        num_attention_heads=max(sizes.width // 64, 4),
        image_size=sizes.side,
        patch_size=14,
    )
    config = LlavaConfig(
        vision_config=tower,
        text_config=LlamaConfig(**text_sizes(sizes)),
        image_token_index=MARKER,
    )
    side = {"height": sizes.side, "width": sizes.side}
    shapes = {"size": {"shortest_edge": sizes.side}, "crop_size": side}
    save(
        LlavaForConditionalGeneration,
        config,
        {"image_processor_type": "CLIPImageProcessor", **shapes},
        folder,
    )


def qwen2_vl(sizes: Sizes, folder: Path) -> None:
    """A random Qwen2-VL."""
    heads = max(sizes.width // 64, 4)
    pairs = sizes.width // heads // 2
    sections = [pairs - 2 * (3 * pairs // 8), 3 * pairs // 8, 3 * pairs // 8]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    config = Qwen2VLConfig(
        text_config={**text_sizes(sizes), "rope_parameters": rope},
        vision_config={
            "depth": max(sizes.tower_layers // 2, 2),
            "embed_dim": sizes.width,
            "hidden_size": sizes.width,
            "num_heads": heads,
            "mlp_ratio": sizes.inner // sizes.width,
        },
        image_token_id=MARKER,
        video_token_id=127,
        vision_start_token_id=125,
        vision_end_token_id=124,
    )
    limits = {"min_pixels": 56 * 56, "max_pixels": sizes.pixels}
    save(
        Qwen2VLForConditionalGeneration,
        config,
        {"image_processor_type": "Qwen2VLImageProcessor", **limits},
        folder,
    )


def save(model_class: Any, config: PretrainedConfig, processor: dict[str, Any], to: Path) -> None:
    torch.manual_seed(0)
    model_class(config).save_pretrained(to)
    (to / "preprocessor_config.json").write_text(json.dumps(processor))
    ascii_tokenizer(MARKER).save_pretrained(to)


class Contest:
    """One family on one device: what both sides do, and how long it takes them."""

    def __init__(self, path: Path, device: str, sizes: Sizes) -> None:
        self.sizes, self.device = sizes, device
        dtype = "float32" if device == "cpu" else "bfloat16"
        self.program = load_program(
            path, device=device, dtype=dtype, max_rows=8, num_blocks=2000, max_batched_tokens=2048
        )
        model_class = self.program.config.model.rope.sections and Qwen2VLForConditionalGeneration
        model_class = model_class or LlavaForConditionalGeneration
        self.dtype = getattr(torch, dtype)
        self.oracle = model_class.from_pretrained(path, dtype=self.dtype).to(device).eval()
        self.processor = AutoImageProcessor.from_pretrained(path)
        self.pictures = 0
        self.runs: dict[str, list[float]] = {}

    def run(self, rounds: int) -> dict[str, list[float]]:
        """Milliseconds of every round, by case; the first round warms up."""
        for turn in range(-1, rounds):
            if turn == 0:
                self.runs = {}
            self.encode()
            self.first_tokens(compared=turn < 0)
            self.stall()
        return self.runs

    def new_picture(self) -> Image.Image:
        self.pictures += 1
        return picture(*self.sizes.photo, seed=self.pictures)

    def timed(self, case: str, work: Callable[[], Any]) -> Any:
        self.wait()
        start = time.perf_counter()
        found = work()
        self.wait()
        self.runs.setdefault(case, []).append(1000 * (time.perf_counter() - start))
        return found

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    @torch.inference_mode()
    def encode(self) -> None:
        vision, image = self.program.vision, self.new_picture()
        _, request = self.prepared(empty_processor_cache(0), [image], "")
        item = dict(request.features[0].data)
        self.timed("encode", lambda: vision.family.encode(vision.params, vision.config, [item]))
        given = self.given([image])
        features = self.oracle.model.get_image_features
        self.timed(f"{PEER}/encode", lambda: features(**given).pooler_output)

    def prepared(self, cache: Any, images: list[Image.Image], text: str) -> tuple[Any, Request]:
        greedy = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        prompt = text + "<image> What is this?" * len(images)
        return prepare_cached(
            self.program, cache, prompt, id="asked", images=images, sampling=greedy
        )

    def given(self, images: list[Image.Image]) -> dict[str, Any]:
        processed = self.processor(images=images, return_tensors="pt")
        return {
            name: x.to(self.device, self.dtype if x.is_floating_point() else None)
            for name, x in processed.items()
        }

    @torch.inference_mode()
    def theirs(self, images: list[Image.Image], tokens: list[int]) -> int:
        """transformers' first token, from pictures."""
        given, ids = self.given(images), torch.tensor([tokens], device=self.device)
        if "image_grid_thw" in given:
            given["mm_token_type_ids"] = (ids == MARKER).int()
        return int(self.oracle(input_ids=ids, logits_to_keep=1, **given).logits[0, -1].argmax())

    def ours(self, cache: Any, image: Image.Image, text: str) -> tuple[Request, int]:
        """Our first token, from a picture."""
        self.cache, request = self.prepared(cache, [image], text)
        self.state = submit(self.state, request)
        while not self.state.host.idle:
            self.state, outputs = step(self.program, self.state)
        return request, int(outputs.finished[0].tokens[0])

    def first_tokens(self, compared: bool) -> None:
        """Of a new picture, of a known one behind another text, of a prompt asked before."""
        image, empty = self.new_picture(), empty_processor_cache(1 << 30)
        letters = [chr(97 + (self.pictures * 7 + n) % 26) * self.sizes.text for n in range(2)]
        self.state = init(self.program)
        for case, text in (("", letters[0]), ("_known", letters[1]), ("_same", letters[1])):
            cache = self.cache if case else empty
            request, token = self.timed(
                f"first_token{case}", lambda c=cache, t=text: self.ours(c, image, t)
            )
            theirs = self.timed(
                f"{PEER}/first_token{case}", lambda r=request: self.theirs([image], r.tokens)
            )
            if compared:
                same = "equals" if token == theirs else "differs from"
                print(f"{self.device} first token{case}: {same} that of {PEER}", flush=True)
        self.timed("processor", lambda: self.prepared(empty, [image], letters[0]))
        self.timed("processor_cached", lambda: self.prepared(self.cache, [image], letters[0]))
        for case in ("processor", "processor_cached"):
            self.timed(f"{PEER}/{case}", lambda: self.processor(images=image, return_tensors="pt"))

    def stall(self) -> None:
        """Steps of decoding rows, with three new images beside them and without."""
        images = [self.new_picture() for _ in range(3)]
        _, request = self.prepared(empty_processor_cache(0), images, "")
        program = one_image_a_step(self.program, request)
        state = decoding(program, self.sizes)
        for _ in range(self.sizes.steps):
            state, _ = self.timed("decode", lambda s=state: step(program, s))
        state, longest = submit(state, request), 0.0
        while "asked" in state.host.requests:
            state, _ = self.timed("beside", lambda s=state: step(program, s))
            longest = max(longest, self.runs["beside"][-1])
        self.runs.setdefault("stall", []).append(longest)
        self.timed(f"{PEER}/stall", lambda: self.theirs(images, request.tokens))


def one_image_a_step(program: Program, request: Request) -> Program:
    """The program with the bounds that keep other rows going: one image, 256 tokens of a prompt."""
    config = replace(
        program.config,
        max_encoder_tokens=max(feature.num_embeds for feature in request.features),
        long_prefill_threshold=256,
    )
    return replace(program, config=config)


def decoding(program: Program, sizes: Sizes) -> EngineState:
    """A state whose rows have their prompts behind them."""
    forever = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)
    state = init(program)
    for row in range(sizes.rows):
        tokens = [3 + (row * 31 + n) % 90 for n in range(sizes.text)]
        state = submit(state, Request(id=str(row), tokens=tokens, sampling=forever))
    for _ in range(3):
        state, _ = step(program, state)
    return state


if __name__ == "__main__":
    main()
