"""From a user's pictures to a Request: places, counts, tensors, order, options, refusals."""

import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlavaProcessor, PreTrainedTokenizerFast

from purestep.engine import Program, Request, for_adapters, init, load_program, prepare, submit
from purestep.engine.chat import chat_tokens
from purestep.engine.image_processor import make_image_processor
from purestep.engine.images import Item, place
from purestep.state.errors import CheckpointError, ConfigError, MediaError, RequestError
from tests.engine.test_pictures import data_url, encoded
from tests.engine.test_processor_cache import message
from tests.engine.tiny import GREEDY, run, tiny_program
from tests.engine.tiny_images import (
    IMAGES_FIRST,
    PARTS,
    WORDS,
    ascii_tokenizer,
    assert_same_request,
    counted,
    folder,
    image_program,
    spans,
)
from tests.models.tiny_vision import SIDE, load, picture, processed

KINDS = ("llava", "llava-siglip", "llava_next", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
WOVEN = ("gemma3", "idefics3", "smolvlm", "pixtral")
SIZES = [  # width, height
    (1, 1), (1, 200), (200, 1), (3, 500), (500, 3), (1, 28), (13, 13), (28, 28), (29, 27),
    (332, 27), (26, 28), (56, 56), (57, 55), (64, 48), (300, 120), (100, 400),
]  # fmt: skip


def text_of(program: Program, request: Request) -> str:
    return program.tokenizer.decode(request.tokens)


def by_every_door(image: Image.Image) -> list[Any]:
    array = np.asarray(image)
    chw = torch.from_numpy(np.moveaxis(array, -1, 0).copy())
    return [
        image,
        {"type": "image", "image": array, "layout": "HWC"},
        {"type": "image", "image": chw, "layout": "CHW"},
        {"type": "image_url", "image_url": {"url": data_url(encoded(image)), "detail": "auto"}},
        {"type": "image_url", "image_url": data_url(encoded(image))},
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tensors_and_counts_are_those_of_transformers(kind: str, size: tuple[int, int]) -> None:
    """MP-01, MP-02: the same by every door, at every shape; as many places as encoder rows."""
    program, model, image = image_program(kind), load(kind), picture(*size)
    parts = by_every_door(image)
    want = model.processor(images=image, return_tensors="pt")
    request = prepare(program, message("hi", *parts), id="r")
    assert len(request.features) == len(parts)
    for feature in request.features:
        pixels = want["pixel_values"] if "qwen" in kind else want["pixel_values"][0]
        assert feature.data["pixel_values"].equal(pixels)
        if "qwen" in kind:
            assert feature.grid == tuple(want["image_grid_thw"][0].tolist())
        assert feature.length == feature.num_embeds == len(model.encode([feature.data])[0])
        assert request.tokens[feature.offset : feature.end] == [model.marker] * feature.length
    assert request.tokens.count(model.marker) == sum(f.length for f in request.features)


@pytest.mark.parametrize("kind", WOVEN)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_texts_between_rows_change_no_tensor(kind: str, size: tuple[int, int]) -> None:
    """MP-01, MP-02 where a picture's place has more in it than rows; Pixtral's own processor
    refuses what is thinner than its patches."""
    program, model, image = image_program(kind), load(kind), picture(*size)
    if kind == "pixtral" and max(size) > 70 * min(size):
        with pytest.raises(MediaError, match="PixtralImageProcessorPil refuses"):
            prepare(program, message(image), id="r")
        return
    want = model.processor(images=image, return_tensors="pt")["pixel_values"]
    parts = by_every_door(image)
    request = prepare(program, message("hi", *parts), id="r")
    tokens = np.array(request.tokens)
    assert len(request.features) == len(parts)
    for feature in request.features:
        assert feature.data["pixel_values"].equal(want if kind == "gemma3" else want[0])
        inside = tokens[feature.offset : feature.end]
        assert np.array_equal(feature.is_embed, inside == model.row_id)
        assert feature.num_embeds == len(model.encode([feature.data])[0])


def greedy_by_transformers(kind: str, tokens: list[int], images: list[Image.Image]) -> list[int]:
    model, prompt = load(kind), torch.tensor([tokens])
    given = processed(model, images)
    if "qwen" in kind:
        given["mm_token_type_ids"] = (prompt == model.marker).int()
    out = model.oracle.generate(
        input_ids=prompt, **given, max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    return out[0, len(tokens) :].tolist()


@pytest.mark.parametrize("kind", [*KINDS, "idefics3", "smolvlm", "pixtral"])
def test_from_a_picture_to_the_right_token(kind: str) -> None:
    """Image first, in the midst, last; a broken picture beside them hurts its own request alone
    (MP-08)."""
    program = image_program(kind)
    a, b, c = picture(60, 40), picture(28, 90, seed=1), picture(150, 30, seed=2)
    prompts = {"first": [a, "hi"], "midst": ["x", b, "y", a, "z"], "last": ["hello", c]}
    state = init(program)
    for name, parts in prompts.items():
        state = submit(state, prepare(program, message(*parts), id=name, sampling=GREEDY))
        with pytest.raises(MediaError):
            prepare(program, message(*parts, b"broken"), id="broken", sampling=GREEDY)
    _, done = run(program, state)
    for name, parts in prompts.items():
        images = [part for part in parts if not isinstance(part, str)]
        tokens = prepare(program, message(*parts), id=name).tokens
        assert done[name].tokens[:6].tolist() == greedy_by_transformers(kind, tokens, images)


def test_embeddings_say_what_their_picture_says() -> None:
    """What the encoder would have made, given as rows, is as good as the picture."""
    program, model = image_program(), load("llava")
    image = picture(60, 40)
    (rows,) = model.encode([model.item(image)])
    given = message("a", {"type": "image_embeds", "image_embeds": rows}, "b")
    asked = [
        prepare(program, prompt, id=name, sampling=GREEDY)
        for name, prompt in (("rows", given), ("pixels", message("a", image, "b")))
    ]
    _, done = run(program, init(program), asked)
    assert done["rows"].tokens.tolist() == done["pixels"].tokens.tolist()
    np.testing.assert_allclose(done["rows"].logprobs, done["pixels"].logprobs, atol=1e-5)


def test_the_largest_picture_of_a_processor_may_be_encoded() -> None:
    """By default, whatever its settings are: 40 rows here, and 1280 where max_pixels says so."""
    path = folder("qwen2_vl")
    for most in (28 * 28 * 40, 28 * 28 * 1280):
        call = load("qwen2_vl").processor
        settings = {**call.to_dict(), "size": {"shortest_edge": 3136, "longest_edge": most}}
        processor = make_image_processor(type(call)(**settings))
        options = {"image_processor": processor, "max_batched_tokens": 64, "num_blocks": 8}
        program = load_program(path, device="cpu", **options)
        assert program.config.max_encoder_tokens >= most // 28**2


def test_a_whole_prompt_is_that_of_llavas_own_processor() -> None:
    program = image_program()
    theirs = LlavaProcessor(
        image_processor=load("llava").processor,
        tokenizer=program.tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    images = [picture(60, 40), picture(20, 90), picture(60, 40, seed=1)]
    text = "a<image>b c<image><image>"
    want = theirs(text=text, images=images, return_tensors="pt")
    request = prepare(program, text, id="r", images=images)
    assert request.tokens == want["input_ids"][0].tolist()
    for feature, pixels in zip(request.features, want["pixel_values"], strict=True):
        assert feature.data["pixel_values"].equal(pixels)


def test_a_prompt_may_be_ids() -> None:
    program = image_program()
    text, images = "a<image>b<image>", [picture(60, 40), picture(20, 90)]
    want = prepare(program, text, id="r", images=images)
    for ids in (program.tokenizer.encode(text), np.array(program.tokenizer.encode(text))):
        assert_same_request(prepare(program, ids, id="r", images=images), want)
    assert prepare(program, [5, 6], id="r").tokens == [5, 6]
    assert prepare(tiny_program(), np.array([5, 6]), id="r").tokens == [5, 6]


parts = st.lists(st.text("ab <>image\n", max_size=9) | st.integers(0, 2), max_size=6)


@given(parts=parts)
@settings(max_examples=60)
def test_items_keep_their_order_and_text_its_place(parts: list[str | int]) -> None:
    """MP-11: the prompt is its parts, one after the other, each picture where it was put."""
    program, marker = image_program(), load("llava").marker
    images = [picture(30, 20 + n) for n in range(3)]
    given = [images[p] if isinstance(p, int) else p for p in parts]
    request = prepare(program, message(*given), id="r")
    alone = [prepare(program, message(image), id="r").features[0] for image in images]
    want: list[int] = []
    features = iter(request.features)
    for part in ["[user]", *parts, "[assistant]"]:
        if isinstance(part, int):
            feature = next(features)
            assert feature.offset == len(want)
            assert feature.digest == alone[part].digest
            assert feature.data["pixel_values"].equal(alone[part].data["pixel_values"])
            want += [marker] * feature.length
        else:
            want += [i for letter in part for i in program.tokenizer.encode(letter)]
    assert request.tokens == want
    assert next(features, None) is None


def test_swapping_two_pictures_swaps_their_spans() -> None:
    """MP-11, on a family whose spans have different lengths."""
    program = image_program("qwen2_vl")
    a, b = picture(56, 56), picture(140, 84)
    one = prepare(program, message("x", a, "y", b, "z"), id="r")
    other = prepare(program, message("x", b, "y", a, "z"), id="r")
    assert [f.length for f in one.features] == [4, 15] == [f.length for f in other.features][::-1]
    assert [f.digest for f in one.features] == [f.digest for f in other.features][::-1]
    assert text_of(program, one).replace("<image>", "") == "[user]xyz[assistant]"
    thrice = prepare(program, message(a, "x", a, a), id="r")
    assert spans(thrice) == [(6, 4), (11, 4), (15, 4)]
    assert len({f.digest for f in thrice.features}) == 1


def item(*ids: int, is_embed: Any = None) -> Item:
    return Item(digest="d", ids=np.array(ids, np.int32), is_embed=is_embed, grid=None, data={})


@pytest.mark.parametrize(
    ("tokens", "items", "want", "where"),
    [
        ([1, 99, 2, 99], [item(99, 99), item(9, 9, 9)], [1, 99, 99, 2, 9, 9, 9], [(1, 2), (4, 3)]),
        ([99, 99, 1, 2], [item(7, 7, 7)] * 2, [7, 7, 7, 7, 7, 7, 1, 2], [(0, 3), (3, 3)]),
        ([1, 99, 99, 2, 1], [item(7, 7)] * 2, [1, 7, 7, 7, 7, 2, 1], [(1, 2), (3, 2)]),
        ([99], [item(8, 7, 8, is_embed=np.array([0, 1, 0], bool))], [8, 7, 8], [(0, 3)]),
        ([1, 2], [], [1, 2], []),
    ],
)  # fmt: skip
def test_places_of_the_specification(
    tokens: list[int], items: list[Item], want: list[int], where: list[tuple[int, int]]
) -> None:
    """Section 3.5; its second and third rows, with too few and too many places, are refused."""
    found, features = place(tokens, 99, items)
    assert found == want
    assert [(f.offset, f.length) for f in features] == where
    assert [f.is_embed for f in features] == [i.is_embed for i in items]


@given(
    layout=st.lists(st.lists(st.integers(0, 98), max_size=4), min_size=1, max_size=5),
    lengths=st.lists(st.integers(1, 5), min_size=4, max_size=4),
)
def test_placing_is_joining(layout: list[list[int]], lengths: list[int]) -> None:
    tokens, want, items = list(layout[0]), list(layout[0]), []
    for text, length in zip(layout[1:], lengths, strict=False):
        items.append(item(*range(200, 200 + length)))
        tokens += [99, *text]
        want += [*items[-1].ids.tolist(), *text]
    found, features = place(tokens, 99, items)
    assert found == want
    for feature, put in zip(features, items, strict=True):
        assert found[feature.offset : feature.end] == put.ids.tolist()


def test_images_may_be_put_before_or_behind_a_prompt_without_places() -> None:
    program, images = image_program(), [picture(60, 40), picture(20, 90)]
    rows = load("llava").count(load("llava").item(images[0]))
    first = prepare(program, "ab", id="r", images=images, images_at="start")
    last = prepare(program, "ab", id="r", images=images, images_at="end")
    assert spans(first) == [(0, rows), (rows, rows)]
    assert spans(last) == [(2, rows), (2 + rows, rows)]
    assert [f.digest for f in first.features] == [f.digest for f in last.features]
    assert_same_request(first, prepare(program, "<image><image>ab", id="r", images=images))
    with pytest.raises(MediaError, match="the prompt itself has 1 places"):
        prepare(program, "a<image>", id="r", images=images, images_at="end")
    with pytest.raises(MediaError, match="images_at='middle' must be one of"):
        prepare(program, "a", id="r", images=images, images_at="middle")


@pytest.mark.parametrize("template", [PARTS, WORDS, IMAGES_FIRST], ids=["parts", "words", "first"])
def test_templates_that_know_parts_words_or_both(template: str) -> None:
    """Where a template has no place for an image, it stands on a line of its own in the message."""
    program = image_program(template=template)
    image = picture(60, 40)
    chat = [*message("a", image, "b"), {"role": "bot", "content": "yes"}, *message("c", image)]
    want = {
        PARTS: "[user]a<image>b[bot]yes[user]c<image>[assistant]",
        WORDS: "[user]a\n<image>\nb[bot]yes[user]c\n<image>[assistant]",
        IMAGES_FIRST: "[user]<image>ab[bot]yes[user]<image>c[assistant]",
    }[template]
    assert_same_request(
        prepare(program, chat, id="r"),
        prepare(program, want, id="r", images=[image, image]),
    )


def test_a_part_that_a_template_of_words_cannot_write_is_refused() -> None:
    for part in ({"type": "thinking", "thinking": "hm"}, "words", {"type": "text", "text": 3}):
        chat = [{"role": "user", "content": [part]}]
        with pytest.raises(RequestError, match="writes text alone"):
            prepare(image_program(template=WORDS), chat, id="r")


def test_a_template_may_be_in_the_file_of_older_processors(tmp_path: Path) -> None:
    path = shutil.copytree(folder("llava"), tmp_path / "model")
    (path / "chat_template.jinja").unlink()
    older = path / "chat_template.json"
    older.write_text(json.dumps({"chat_template": PARTS}))
    program = load_program(path, device="cpu", num_blocks=8)
    assert text_of(program, prepare(program, message("a"), id="r")) == "[user]a[assistant]"
    older.write_text("[]")
    with pytest.raises(CheckpointError, match=r"chat_template\.json holds no chat_template"):
        load_program(path, device="cpu", num_blocks=8)


def test_a_template_that_writes_nothing_is_refused() -> None:
    for template in ("[assistant]", "{{ raise_exception('never') }}"):
        program = image_program(template=template)
        with pytest.raises(RequestError, match="writes neither"):
            prepare(program, message("a"), id="r")


LITERALS = (
    "<image>",
    "a<image>b",
    "<<image>>",
    "<image><image>",
    "\ue000<image>\ue001",
    " <image> ",
)


@pytest.mark.parametrize("template", [PARTS, WORDS, IMAGES_FIRST], ids=["parts", "words", "first"])
@pytest.mark.parametrize("typed", LITERALS)
def test_the_letters_of_a_marker_are_text(template: str, typed: str) -> None:
    """W34, W35: typed by a user they are no place for an image, and decode to what was typed."""
    program, marker = image_program(template=template), load("llava").marker
    image = picture(60, 40)
    ascii_only = typed.encode("ascii", "ignore").decode()
    for content in (typed, message(typed)[0]["content"]):
        request = prepare(program, [{"role": "user", "content": content}], id="r")
        assert marker not in request.tokens
        assert text_of(program, request) == f"[user]{ascii_only}[assistant]"
    request = prepare(program, message(typed, image, typed), id="r")
    (feature,) = request.features
    assert request.tokens.count(marker) == feature.length
    text = program.tokenizer.decode([t for t in request.tokens if t != marker])
    assert text.replace("\n", "") == f"[user]{ascii_only}{ascii_only}[assistant]"
    named = [{"role": typed, "content": [{"type": "text", "text": "x"}]}]
    assert marker not in prepare(program, named, id="r").tokens


@given(text=st.text("<image>ab ", max_size=30))
def test_no_text_is_ever_a_place(text: str) -> None:
    program = image_program()
    request = prepare(program, message(text), id="r")
    assert load("llava").marker not in request.tokens
    assert text_of(program, request) == f"[user]{text}[assistant]"


def test_a_piece_behind_a_cut_gets_no_space_of_its_own() -> None:
    """SentencePiece tokenizers put a space before the first piece of a text, and no other."""
    words = ["<unk>", "▁", "a", "b", "<", "image", ">", "▁a", "[user]", "[assistant]"]
    backend = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, extra_special_tokens={"image_token": "<image>"}
    )
    tokenizer.chat_template = PARTS
    marker = tokenizer.convert_tokens_to_ids("<image>")
    image = {"type": "image", "image": None}
    ids = chat_tokens(tokenizer, message("a<image>b", image, "a"), {}, marker, "r")
    assert ids.count(marker) == 1
    pieces = tokenizer.convert_ids_to_tokens(ids)
    assert "".join(pieces) == "▁[user]a<image>b<image>a[assistant]"


def test_a_marker_that_a_tokenizer_makes_of_other_letters_is_refused() -> None:
    """One that narrows wide letters before it looks for its tokens: no picture stands there."""
    tokenizer = ascii_tokenizer(load("llava").marker)
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    backend["normalizer"] = {"type": "NFKC"}
    for token in backend["added_tokens"]:
        token["normalized"] = True
    wide = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(backend)), chat_template=PARTS
    )
    program = replace(image_program(), tokenizer=wide)
    assert prepare(program, message("a"), id="r").tokens
    with pytest.raises(MediaError, match=r"1 places for an image .* 0 images are given"):
        prepare(program, message("\uff1cimage\uff1e"), id="r")


@pytest.mark.parametrize("count", range(4))
def test_a_limit_is_a_limit(count: int) -> None:
    """MP-15."""
    program = image_program(image_limit=2)
    images = [picture(30, 20)] * count
    if count <= 2:
        assert len(prepare(program, message("a", *images), id="r").features) == count
        return
    with pytest.raises(MediaError, match=r"'r': 3 images .* takes 2 in one prompt: image_limit=2"):
        prepare(program, message("a", *images), id="r")
    with pytest.raises(MediaError, match="image_limit=2"):
        prepare(program, "<image>" * 3, id="r", images=images)


VIDEO = {"type": "video", "video": "clip.mp4"}
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a place without an image": ("a<image>", {}, "1 places for an image .* 0 images"),
    "an image without a place": ("a", {"images": [picture(9, 9)]}, "0 places .* 1 images"),
    "two for one": ("<image>", {"images": [picture(9, 9)] * 2}, "1 places .* 2 images"),
    "one for two": ("<image><image>", {"images": [picture(9, 9)]}, "2 places .* 1 images"),
    "a video": (message("a", VIDEO), {}, "a part of type 'video'"),
    "images= beside messages": (message("a"), {"images": [picture(9, 9)]}, "not images="),
    "one image, no list": ("<image>", {"images": picture(9, 9)}, "must be a list of pictures"),
    "an array of images": ("<image>", {"images": np.zeros((1, 9, 9, 3))}, "must be a list"),
    "no image in a part": (message({"type": "image"}), {}, "image 1 of 1: the part has no 'image'"),
    "an unknown key": (
        message({"type": "image", "image": picture(9, 9), "max_pixels": 9}),
        {},
        "'max_pixels' is no key of an image part: image, id, layout, options",
    ),
    "a url": (
        message({"type": "image_url", "image_url": {"url": "http://x/y.png"}}),
        {},
        "must be a data: URL, got 'http",
    ),
    "a path as a url": (message({"type": "image_url", "image_url": "/etc/hosts"}), {}, "data: URL"),
    "detail": (
        message({"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}),
        {},
        "image_url has {'detail': 'low'}",
    ),
    "an id of no letters": (message({"type": "image", "id": ""}), {}, "id='' must be"),
    "a layout of an image": (
        message({"type": "image", "image": picture(9, 9), "layout": "HWC"}),
        {},
        "layout='HWC' is for arrays",
    ),
    "an unknown option": (
        message(picture(9, 9)),
        {"image_options": {"patch_size": 7}},
        "'patch_size' is no option of CLIPImageProcessorPil",
    ),
    "an option of another family": (
        message(picture(9, 9)),
        {"image_options": {"max_pixels": 7}},
        "'max_pixels' is no option",
    ),
    "options that are none": (message(picture(9, 9)), {"image_options": [1]}, "image_options"),
    "an option of a wrong type": (
        message(picture(9, 9)),
        {"image_options": {"do_resize": "yes please"}},
        "CLIPImageProcessorPil refuses 9 x 9 pixels with",
    ),
    "a size the tower does not take": (
        message(picture(9, 9)),
        {"image_options": {"crop_size": {"height": 28, "width": 28}}},
        "image 1 of 1: the image processor made pixels of shape",
    ),
    "a part, no list": (
        [{"role": "user", "content": {"type": "image", "image": picture(9, 9)}}],
        {},
        "must be a list of parts",
    ),
    "a message of text": ([*message("a"), "b"], {}, "'b' is no message"),
    "a size for a bomb": (
        message(picture(9, 9)),
        {"image_options": {"size": {"height": 10**5, "width": 10**5}}},
        "size=.* asks for 10000000000 pixels, more than max_pixels=",
    ),
    "a long edge for a bomb": (
        message(picture(9, 9)),
        {"image_options": {"size": {"longest_edge": 10**5}}},
        "asks for 10000000000 pixels",
    ),
    "a crop for a bomb": (
        message(picture(9, 9)),
        {"image_options": {"crop_size": 10**5}},
        "crop_size=100000 asks for 10000000000 pixels",
    ),
    "a picture blown up": (message(picture(1, 40_000)), {}, "would be resized to .* max_pixels="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_name(case: str) -> None:
    """MP-15, MP-12: before anything is submitted, as an error of this request alone."""
    prompt, options, message = REFUSED[case]
    with pytest.raises(MediaError, match=rf"^request 'r': .*{message}"):
        prepare(image_program(), prompt, id="r", **options)


def test_the_aspect_limit_of_a_processor_is_told_with_the_size() -> None:
    """MP-01: 1 x 200 works on Qwen2-VL and 1 x 201 does not."""
    program = image_program("qwen2_vl")
    assert prepare(program, message(picture(1, 200)), id="r").features
    with pytest.raises(MediaError, match=r"image 1 of 1: Qwen2VLImage.* 1 x 201 pixels.*200"):
        prepare(program, message(picture(1, 201)), id="r")


def test_a_model_of_text_takes_no_image() -> None:
    """MP-15: nor does a multimodal one without its tower, which is then a model of text."""
    text = image_program(image_limit=0)
    assert text.vision is None
    assert text.image_processor is None
    for program in (text, tiny_program(tokenizer=text.tokenizer)):
        with pytest.raises(MediaError, match=r"1 images are given.* takes 0 .*image_limit=0"):
            prepare(program, message("a", picture(9, 9)), id="r")
        with pytest.raises(MediaError, match="takes 0"):
            prepare(program, "a", id="r", images=[picture(9, 9)])
        assert text_of(program, prepare(program, message("a"), id="r")) == "[user]a[assistant]"


def test_without_an_image_processor_pictures_are_refused() -> None:
    program = load_program(folder("llava"), device="cpu", num_blocks=8, image_processor=None)
    with pytest.raises(ConfigError, match="no image processor"):
        prepare(program, message(picture(9, 9)), id="r")


def qwen_grids(options: list[dict[str, Any]]) -> Iterator[tuple[int, int, int] | None]:
    """What transformers makes of one picture under each of the options."""
    for each in options:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it would have `size` instead
            out = load("qwen2_vl").processor(images=picture(300, 200), return_tensors="pt", **each)
        yield tuple(out["image_grid_thw"][0].tolist())


def test_processor_options_of_a_request_change_pixels_count_and_name() -> None:
    """MP-12: and a cache keeps them apart, whichever way they were given."""
    program, counting = counted(image_program("qwen2_vl"))
    options = [{"max_pixels": 28 * 28 * 4}, {"max_pixels": 28 * 28 * 16}, {}]
    image = picture(300, 200)
    each = [prepare(program, message(image), id="r", image_options=o) for o in options]
    assert [r.features[0].grid for r in each] == list(qwen_grids(options))
    assert len({r.features[0].length for r in each}) == 3
    counting.sizes.clear()
    own = [{"type": "image", "image": image, "options": o} for o in options]
    together = prepare(program, message(*own), id="r")
    assert [f.digest for f in together.features] == [r.features[0].digest for r in each]
    assert len(counting.sizes) == 3
    size = {"size": {"longest_edge": 28 * 28 * 4, "shortest_edge": 56 * 56}}
    same = prepare(program, message(image), id="r", image_options=size)
    assert same.features[0].digest == each[0].features[0].digest, "one setting in two spellings"
    over = prepare(program, message(own[0]), id="r", image_options=options[1])
    assert over.features[0].digest == each[0].features[0].digest, "a part's own go first"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_pixels": 0}, "max_pixels=0 must be"),
        ({"min_pixels": 2.5}, "min_pixels=2.5 must be"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels=9 is more than max_pixels=8"),
        ({"max_pixels": 9, "size": {"longest_edge": 3}}, "not both"),
        ({"size": {"height": 3}}, "refuses"),
        ({"merge_size": 1}, "'merge_size' is no option"),
        ({"do_resize": False}, "."),
        (
            {"min_pixels": 10**8, "max_pixels": 10**9},
            "size=.* asks for 100000000 pixels, more than",
        ),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(MediaError, match=match):
        prepare(image_program("qwen2_vl"), message(picture(30, 41)), id="r", image_options=options)


@pytest.mark.parametrize("kind", [*KINDS, *WOVEN])
def test_an_item_alone_is_the_item_in_a_batch(kind: str) -> None:
    """DT-05: nor do threads change a bit, nor the transformers class that was chosen (MP-14)."""
    program, images = image_program(kind), [picture(64, 48), picture(30, 90), picture(300, 20)]
    together = prepare(program, message(*images), id="r")
    assert program.image_processor.name == type(load(kind).processor).__name__
    assert program.image_processor.name.endswith("Pil")
    threads = torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            for image, feature in zip(images, together.features, strict=True):
                (alone,) = prepare(program, message(image), id="r").features
                assert alone.digest == feature.digest
                assert alone.grid == feature.grid
                for name, tensor in alone.data.items():
                    assert tensor.equal(feature.data[name])
    finally:
        torch.set_num_threads(threads)


def test_embeddings_need_no_encoder() -> None:
    program, marker = image_program(), load("llava").marker
    rows = torch.randn(5, program.config.model.hidden_size)
    part = {"type": "image_embeds", "image_embeds": rows}
    request = prepare(program, message("a", part, picture(9, 9), part), id="r")
    first, image, last = request.features
    assert [f.length for f in request.features] == [5, image.length, 5]
    assert request.tokens[first.offset : first.end] == [marker] * 5
    assert first.data["embeds"].equal(rows)
    assert first.data["embeds"] is not rows
    assert first.digest == last.digest != image.digest
    raw = prepare(program, "a<image>", id="r", images=[part | {"image_embeds": rows.numpy()}])
    assert raw.features[0].digest == first.digest
    for bad in (rows[:, :3], rows[0], rows.int(), rows * np.nan, "rows", rows[:0]):
        with pytest.raises(MediaError, match=r"'r': image 1 of 1: image_embeds "):
            prepare(program, message({"type": "image_embeds", "image_embeds": bad}), id="r")
    with pytest.raises(MediaError, match="does not place by a grid"):
        prepare(program, message(part | {"grid": (1, 1, 5)}), id="r")


def test_embeddings_bring_their_grid_where_a_model_places_by_it() -> None:
    program = image_program("qwen2_vl")
    rows = torch.randn(6, program.config.model.hidden_size)
    part = {"type": "image_embeds", "image_embeds": rows}
    request = prepare(program, message(part | {"grid": [1, 4, 6]}), id="r")
    assert request.features[0].grid == (1, 4, 6)
    other = prepare(program, message(part | {"grid": (1, 6, 4)}), id="r")
    assert other.features[0].digest != request.features[0].digest
    for grid in (None, (1, 4), (1, 4, 4), (1, 3, 8), (1, 4, 6.0), "146"):
        with pytest.raises(MediaError, match="grid="):
            prepare(program, message(part | {"grid": grid}), id="r")


def test_one_prompt_for_many_adapters_is_prepared_once() -> None:
    """AU-06."""
    program, counting = counted(image_program())
    request = prepare(program, message("a", picture(30, 20)), id="r")
    several = for_adapters(request, [None, "a", "b"])
    assert len(counting.sizes) == 1
    assert all(each.features is request.features for each in several)


def test_what_was_given_stays_as_it_was() -> None:
    program = image_program(template=WORDS)
    image = picture(30, 20)
    chat = message("<image>", image, {"type": "image", "image": image, "options": {}})
    before = [{**m, "content": [dict(part) for part in m["content"]]} for m in chat]
    pixels = np.asarray(image).copy()
    prepare(program, chat, id="r")
    assert chat == before
    np.testing.assert_array_equal(np.asarray(image), pixels)


def test_the_tower_of_a_thin_picture_sees_its_centre() -> None:
    """The pixel limit counts what a processor resizes to, so many a thin picture still works."""
    request = prepare(image_program(), message(picture(1, 1000)), id="r")
    assert request.features[0].data["pixel_values"].shape == (3, SIDE, SIDE)


def test_text_prompts_of_a_multimodal_model_are_as_before() -> None:
    program = image_program()
    assert prepare(program, "ab", id="r").tokens == program.tokenizer.encode("ab")
    request = prepare(program, [{"role": "user", "content": "ab"}], id="r")
    assert text_of(program, request) == "[user]ab[assistant]"
    assert request.features == ()


@pytest.mark.parametrize("wrong", [None, 7, b"text", {"role": "user", "content": "a"}])
def test_what_is_no_prompt_is_refused(wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"^request 'r': a prompt is text, token ids or a list"):
        prepare(image_program(), wrong, id="r")
