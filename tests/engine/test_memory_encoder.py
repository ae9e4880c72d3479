"""What encoding takes is known before the pool is sized (W25)."""

import gc
import json
from pathlib import Path
from typing import Any
from weakref import finalize

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from purestep.engine import Program, load_program, memory
from purestep.engine.cli import main
from purestep.engine.memory import encoder_cache_bytes, kv_block_bytes, tower_rows_bytes
from purestep.engine.memory_encoder import (
    computed_bytes,
    encoder_peak_bytes,
    measured_bytes,
    most_embeds,
    tower_bytes,
)
from purestep.models.checkpoint import load_vision
from purestep.state.errors import ConfigError
from tests.models.tiny_vision import kinds, load, picture, saved

FAMILIES = ("llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
SIZES = [(60, 45), (1, 1), (1, 200), (200, 1), (112, 112), (30, 3000), (400, 400)]
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operations made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), given)
        return made

    def _note(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in given or key in self._known:
            return
        self._known.add(key)
        self.now += nbytes
        self.peak = max(self.peak, self.now)
        finalize(storage, self._gone, key, nbytes)

    def _gone(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_estimate_is_above_what_a_tower_takes(kind: str, dtype: torch.dtype) -> None:
    """And not by far: for the items that a step of any size may encode."""
    vision, _ = load_vision(saved(kind)[0], dtype=dtype)
    settings = load(kind).processor.to_dict()
    for limit in (0, 10, 100, 400):
        items = vision.family.heaviest(vision.config, settings, limit)
        with torch.inference_mode(), Live() as live:
            vision.family.encode(vision.params, vision.config, items)
        computed = computed_bytes(vision.family, vision.config, items, dtype.itemsize)
        assert live.peak < computed < 4 * live.peak, limit


@pytest.mark.parametrize("kind", kinds())
def test_no_pictures_of_a_step_are_heavier(kind: str) -> None:
    """Whatever their shapes, as many as their embeddings admit."""
    model = load(kind)
    family, geometry = model.vision.family, model.vision.config
    settings = model.processor.to_dict()
    for size in SIZES:
        if kind == "pixtral" and max(size) > 70 * min(size):
            continue  # its processor refuses pictures that thin
        item = model.item(picture(*size))
        assert model.count(item) <= most_embeds(family, geometry, settings)
        for limit in (model.count(item), 100, 1000):
            items = [item] * (limit // model.count(item))
            heaviest = family.heaviest(geometry, settings, limit)
            bound = computed_bytes(family, geometry, heaviest, 4)
            assert computed_bytes(family, geometry, items, 4) <= bound, (size, limit)


def blocks(monkeypatch: pytest.MonkeyPatch, available: int, **options: Any) -> Program:
    """A program whose pool is as large as memory allows."""
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    sizes = {"block_size": 8, "max_rows": 64, "max_batched_tokens": 64}
    return load_program(saved("qwen2_vl")[0], device="cpu", **{**sizes, **options})


def test_the_pool_gets_what_encoding_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak and the kept outputs come first; no profile leaves the peak to the user."""
    program = blocks(monkeypatch, 12 << 20)
    config, settings = program.config, program.image_processor.call.to_dict()
    peak = encoder_peak_bytes(config, program.vision, settings)
    kept, block = encoder_cache_bytes(config), kv_block_bytes(config)
    assert kept == config.encoder_cache_tokens * config.model.hidden_size * 4 > 0
    assert min(peak, kept) > 4 * block, "or nothing is seen"
    assert config.num_blocks == ((12 << 20) - peak - kept) // 4 // block
    bare = blocks(monkeypatch, 12 << 20, skip_encoder_profile=True).config
    assert bare.num_blocks == ((12 << 20) - kept) // 4 // block
    text = blocks(monkeypatch, 12 << 20, image_limit=0).config
    assert text.num_blocks == (12 << 20) // 4 // block
    assert blocks(monkeypatch, 12 << 20, num_blocks=7).config.num_blocks == 7
    named = rf"max_encoder_tokens={config.max_encoder_tokens} .* {peak} bytes"
    named += rf".*encoder_cache_tokens=.* {kept}\..*skip_encoder_profile=True"
    with pytest.raises(ConfigError, match=named):
        blocks(monkeypatch, peak + kept)
    with pytest.raises(ConfigError, match=rf"kv_bytes=1 hold no KV block of {block} bytes$"):
        blocks(monkeypatch, 12 << 20, kv_bytes=1)


@pytest.mark.parametrize("kind", FAMILIES)
def test_plan_counts_the_tower(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From files alone, and as the program does it."""
    folder, options = str(saved(kind)[0]), ["--dtype=float32", "--max-batched-tokens=64"]
    assert main(["plan", folder, *options, "--memory=1GiB", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    program = load_program(folder, device="cpu", max_batched_tokens=64, num_blocks=9)
    config, encoder, settings = program.config, plan["encoder"], load(kind).processor.to_dict()
    assert encoder["embeddings"] == config.max_encoder_tokens
    assert encoder["cache"] == encoder_cache_bytes(config)
    assert encoder["largest_step"] == encoder_peak_bytes(config, program.vision, settings)
    assert encoder["weights"] == tower_bytes(program.vision.family, config.vision, 4)
    parts = (plan["weights"], plan["adapters"]["total"], plan["step"], plan["graphs"])
    images = encoder["weights"] + encoder["cache"] + encoder["largest_step"]
    assert plan["fits"]["taken"] == sum(parts) + images
    assert main(["plan", folder, *options]) == 0
    assert f"{encoder['largest_step']:,} B" in capsys.readouterr().out


@pytest.mark.parametrize("kind", FAMILIES)
def test_plan_counts_the_adapters_of_a_tower(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder, options = str(saved(kind)[0]), ["--dtype=float32", "--rank=8", "--max-adapters=3"]
    assert main(["plan", folder, *options, "--json"]) == 0
    without = json.loads(capsys.readouterr().out)["adapters"]
    assert main(["plan", folder, *options, "--lora-tower", "--json"]) == 0
    adapters = json.loads(capsys.readouterr().out)["adapters"]
    config = load_program(folder, device="cpu", num_blocks=9, lora_rows=24).config
    assert config.lora_tower, "the default on a CPU"
    assert 3 * adapters["tower"] == tower_rows_bytes(config) > without["tower"] == 0
    assert adapters["total"] - without["total"] == tower_rows_bytes(config)
    assert adapters["host"] - without["host"] == adapters["tower"]
    assert main(["plan", folder, *options, "--lora-tower"]) == 0
    assert f"{adapters['tower']:,} B" in capsys.readouterr().out


def test_plan_of_a_text_model_has_no_tower(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = load("llava").oracle.config.text_config.to_dict()
    (tmp_path / "config.json").write_text(
        json.dumps(text | {"architectures": ["LlamaForCausalLM"]})
    )
    assert main(["plan", str(tmp_path), "--json"]) == 0
    assert "encoder" not in json.loads(capsys.readouterr().out)
    assert main(["plan", str(tmp_path), "--lora-tower"]) == 2
    assert "lora_tower=True, but this model has no vision tower" in capsys.readouterr().err


@pytest.mark.gpu
@GPU
@pytest.mark.parametrize("kind", FAMILIES)
def test_measured_on_a_gpu(kind: str) -> None:
    """By the largest inputs, and nothing of it stays."""
    gc.collect()  # what earlier tests left would be freed in between
    before = torch.cuda.memory_allocated()
    vision, _ = load_vision(saved(kind)[0], dtype=torch.float32, device="cuda")
    settings = load(kind).processor.to_dict()
    none, most = (vision.family.heaviest(vision.config, settings, n) for n in (0, 4000))
    measured_bytes(vision, none, "cuda", None)  # allocates what cuBLAS keeps
    loaded = torch.cuda.memory_allocated()
    one, more = (measured_bytes(vision, inputs, "cuda", None) for inputs in (none, most))
    assert 0 < one < more
    assert torch.cuda.memory_allocated() == loaded > before
