"""The tree keeps its arrows: engine -> models -> ops -> state, and the README's words are true."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STDLIB = sys.stdlib_module_names

ALLOWED = {
    "state": {"numpy", "blake3", "immutables", "torch"},
    "ops": {"numpy", "torch", "triton"},
    "models": {"numpy", "blake3", "torch", "transformers", "safetensors"},
    "engine": {
        "numpy",
        "blake3",
        "immutables",
        "torch",
        "transformers",
        "safetensors",
        "tqdm",
        "PIL",
        "lm_eval",
        "ray",  # in the files named after them alone
        "accelerate",
        "gguf",
        "tokenizers",  # in demo_model.py alone
    },
}
ARROWS = {
    "state": {"state"},
    "ops": {"ops", "state"},
    "models": {"models", "ops", "state"},
    "engine": {"engine", "models", "ops", "state"},
}


def imports(file: Path) -> set[str]:
    """Dotted names that a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert "*" not in {alias.name for alias in node.names}, f"{file}: wildcard import"
            names.add(node.module)
    return names


@pytest.mark.parametrize("folder", ALLOWED)
def test_imports_point_one_way(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for file in files:
        for name in imports(file):
            top, *rest = name.split(".")
            if top == "purestep":
                assert rest[0] in ARROWS[folder], f"{file} imports {name}"
            else:
                assert top in STDLIB or top in ALLOWED[folder], f"{file} imports {name}"


@pytest.mark.parametrize("folder", ["state", "ops"])
def test_nothing_reads_a_clock_or_the_environment(folder: str) -> None:
    """Purity: no time, no randomness, no environment, no I/O below the edges."""
    for file in (ROOT / folder).rglob("*.py"):
        effects = imports(file) & {"time", "random", "os", "datetime", "pathlib", "secrets", "uuid"}
        assert not effects, f"{file} imports {effects}"


def readme_blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readme_names_what_exists() -> None:
    commands = " ".join(readme_blocks("sh"))
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", commands):
        assert f"\n{target}:" in makefile, f"make {target} does not exist"
    for path in re.findall(r"`((?:engine|state|ops|models|tests|bench)/[\w./]*)`", commands):
        assert (ROOT / path).exists(), path


def test_the_readme_example_runs_as_written(tmp_path: Path) -> None:
    """On tiny checkpoints, an adapter and a picture in place of the reader's own."""
    from PIL import Image

    from tests.engine.test_generate import byte_tokenizer
    from tests.engine.tiny import adapter_folder, checkpoint
    from tests.engine.tiny_images import folder

    model, _ = checkpoint(vocab_size=257, max_position_embeddings=512)
    byte_tokenizer().save_pretrained(model)
    Image.new("RGB", (30, 20)).save(tmp_path / "photo.jpg")
    example, hooks, images = readme_blocks("python")  # each goes on from the one before
    assert len(example.strip().splitlines()) <= 14
    script = tmp_path / "example.py"
    paths = {
        "path/to/checkpoint": str(model),
        "path/to/adapter": str(adapter_folder("a")),
        "path/to/photo.jpg": str(tmp_path / "photo.jpg"),
    }
    seeing = f"program = load_program({str(folder('llava'))!r})\n"
    text = example + hooks + seeing + images
    for placeholder, path in paths.items():
        text = text.replace(placeholder, path)
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2 + 2 + 1
