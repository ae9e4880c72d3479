"""The offline driver, text and stop strings."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from purestep.engine import (
    Completion,
    Outputs,
    Request,
    SamplingParams,
    generate,
    init,
    load_program,
    prepare,
    step,
    submit,
)
from purestep.engine.prepare import byte_alphabet, token_table
from purestep.state.errors import ConfigError, RequestError
from purestep.state.text import TokenTable
from tests.engine.tiny import adapter_folder, alone, checkpoint, prompt, request, run, tiny_program

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "<assistant>{% if think %}hm{% endif %}"
)


def requests_pulled(count: int, pulled: list[int]) -> Iterator[Request]:
    for n in range(count):
        pulled.append(n)
        yield request(str(n), prompt(n, 1 + n % 9), max_tokens=1 + n % 5)


def test_an_iterator_is_pulled_at_most_a_window_ahead() -> None:
    """AU-08: completions come as they finish; finished + window + 1 bounds what was pulled."""
    program, pulled, seen = tiny_program(max_rows=3), [], []
    for done in generate(program, requests_pulled(40, pulled), window=5):
        seen.append(done.id)
        assert len(pulled) <= len(seen) + 5 + 1
    assert sorted(seen, key=int) == [str(n) for n in range(40)]
    assert seen != sorted(seen, key=int), "short ones should overtake long ones"


def test_it_goes_on_from_a_state() -> None:
    """The second run finds the first one's prefix and adapter, and ends as it would alone."""
    program = tiny_program()
    places, asked = {"a": adapter_folder("a")}, request("r", prompt(0, 20), "a", max_tokens=3)
    ends = []

    def kept(**options: object) -> Iterator[Completion]:
        ends.append((yield from generate(program, [asked], adapters=places, **options)))

    (first,) = kept()
    places["a"].rename(moved := places["a"].with_name("moved"))
    try:
        (second,) = kept(state=ends[0])
    finally:
        moved.rename(places["a"])
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 20 - 4, "the last block is computed for its logits"
    assert first.tokens.tolist() == second.tokens.tolist() == alone(asked).tokens.tolist()
    assert ends[1].host.idle


def test_bad_requests_become_completions_with_an_error() -> None:
    """SC-05, SC-06: exactly one result each; the others are as alone."""
    program = tiny_program(max_context=64)
    items = [
        request("0", prompt(0, 5)),
        request("1", prompt(1, 200)),
        request("2", []),
        request("3", prompt(3, 5), "nobody"),
        request("4", prompt(4, 5)),
    ]
    done = {c.id: c for c in generate(program, items)}
    assert sorted(done) == ["0", "1", "2", "3", "4"]
    assert [n for n in done if done[n].finish_reason == "error"] == ["1", "2", "3"]
    assert "max_context=64" in done["1"].error
    for n in "04":
        assert done[n].tokens.tolist() == alone(items[int(n)]).tokens.tolist()


def test_malformed_requests_hurt_nobody() -> None:
    """Tokens that are no sequence give one error completion; what is no request is a TypeError."""
    good = request("ok", prompt(0, 5))
    kinds = (5, None, "ab", [[1], 2], np.array(5))
    odd = [Request(id=str(n), tokens=tokens) for n, tokens in enumerate(kinds)]
    odd.append(Request(id="rows", prompt_embeds=np.zeros((3, 1))))
    odd.append(Request(id="long", tokens=[1] * 5000))
    done = {c.id: c for c in generate(tiny_program(), [*odd, good])}
    assert [done[r.id].finish_reason for r in odd] == ["error"] * 7
    assert [done[r.id].num_prompt_tokens for r in odd] == [0, 0, 2, 2, 0, 3, 5000]
    assert done["ok"].tokens.tolist() == alone(good).tokens.tolist()
    with pytest.raises(TypeError, match="None"):
        list(generate(tiny_program(), [good, None]))


def test_adapters_load_in_the_background() -> None:
    program, steps = tiny_program(), []
    items = [request(str(n), prompt(n, 6), ["a", None, "b", "gone"][n % 4]) for n in range(12)]
    folders = {"a": adapter_folder("a"), "b": adapter_folder("b"), "gone": "/nonexistent"}
    done = {c.id: c for c in generate(program, items, adapters=folders, on_step=steps.append)}
    for item in items:
        if item.adapter == "gone":
            assert done[item.id].finish_reason == "error"
            assert "/nonexistent" in done[item.id].error
        else:
            assert done[item.id].tokens.tolist() == alone(item).tokens.tolist()
    assert all(isinstance(s, Outputs) for s in steps)
    # Base rows run before any adapter is there; when each comes is up to its thread.
    assert steps[0].num_rows > 0
    assert steps[0].num_active_adapters == 0
    assert max(s.num_active_adapters for s in steps) >= 1


def test_an_interrupted_iterator_keeps_what_was_finished() -> None:
    """AU-08: the requests' own exception comes through, after what had finished by then."""

    def failing() -> Iterator[Request]:
        yield from requests_pulled(6, [])
        raise KeyError("the file ended early")

    completions = generate(tiny_program(max_rows=2), failing(), window=2)
    for _ in range(4):
        assert next(completions).finish_reason == "length"
    with pytest.raises(KeyError, match="ended early"):
        list(completions)


def test_a_window_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="window=0"):
        list(generate(tiny_program(), [], window=0))
    assert list(generate(tiny_program(), [])) == []


def letters_program(**options: object) -> object:
    """A program whose token n is two letters, so that stop strings cross token borders."""
    table = [bytes([97 + n % 26, 97 + n // 26 % 26]) for n in range(128)]
    return tiny_program(tokens=TokenTable(table), **options)


def test_stop_strings_end_the_text_across_token_borders() -> None:
    """SL-01: just before the first occurrence; tokens are kept whole; the reason names it."""
    program = letters_program()
    item = request("x", prompt(1, 9), max_tokens=12)
    _, done = run(program, init(program), [item])
    text = done["x"].text
    assert len(text) == 24
    for start in range(1, 20):
        stop = text[start : start + 3]
        at = text.find(stop)
        stopped = request("s", prompt(1, 9), max_tokens=12, stop=(stop, "never there"))
        _, ended = run(program, init(program), [stopped])
        assert ended["s"].text == text[:at]
        assert ended["s"].stop == stop
        assert ended["s"].finish_reason == "stop"
        assert len(ended["s"].tokens) == -(-(at + 3) // 2)


def test_stop_strings_survive_preemption_and_ignore_the_prompt() -> None:
    program = letters_program(num_blocks=20, max_rows=4)
    items = [request(str(n), prompt(n, 20), max_tokens=24) for n in range(4)]
    _, free = run(program, init(program), items)
    assert any(c.num_preemptions for c in free.values())
    stops = {n: free[n].text[33:37] for n in free}
    _, done = run(
        program,
        init(program),
        [request(i.id, i.tokens, max_tokens=24, stop=(stops[i.id],)) for i in items],
    )
    for n in done:
        assert done[n].text == free[n].text[: free[n].text.find(stops[n])]


def test_text_can_keep_the_stop_string_and_comes_in_pieces() -> None:
    """SL-01 with inclusion; what `Outputs.texts` told piece by piece is the completion's text."""
    program = letters_program()
    _, done = run(program, init(program), [request("0", prompt(1, 5), max_tokens=20)])
    stop = done["0"].text[21:23]
    cut = done["0"].text.index(stop)
    for include_stop, want in ((False, cut), (True, cut + 2)):
        words = {"stop": (stop,), "include_stop": include_stop, "stream": True}
        state, told = submit(init(program), request("x", prompt(1, 5), max_tokens=20, **words)), []
        while not state.host.idle:
            state, outputs = step(program, state)
            told += [text for _, text in outputs.texts]
        (ended,) = outputs.finished
        assert (ended.text, ended.stop) == (done["0"].text[:want], stop)
        assert "".join(told) == ended.text
        assert len(told) > 3


def test_no_stop_counts_before_min_tokens() -> None:
    program = letters_program()
    _, done = run(program, init(program), [request("0", prompt(1, 5), max_tokens=20)])
    text = done["0"].text
    for least in (0, 1, 3, 4, 9, 20):
        words = {"stop": (text[4:6], text[30:32]), "min_tokens": least}
        _, ended = run(program, init(program), [request("x", prompt(1, 5), max_tokens=20, **words)])
        places = [text.find(stop, max(2 * least - 3, 0)) for stop in words["stop"]]
        cut = min((at for at in places if at >= 0), default=len(text))
        assert ended["x"].text == text[:cut]
        assert len(ended["x"].tokens) >= least


def test_stop_ids_and_end_tokens() -> None:
    program = letters_program(stop_ids=(7,))
    item = request("x", prompt(1, 9), max_tokens=12)
    tokens = run(program, init(program), [item])[1]["x"].tokens.tolist()
    own = request("own", prompt(1, 9), max_tokens=12, stop_ids=(tokens[4],))
    _, done = run(program, init(program), [own])
    assert done["own"].tokens.tolist() == tokens[: tokens.index(tokens[4]) + 1]
    assert (done["own"].finish_reason, done["own"].stop) == ("stop", tokens[4])
    assert len(done["own"].text) == 2 * tokens.index(tokens[4]), "the stopping token is no text"
    eos = tiny_program(stop_ids=(tokens[2],))
    heeding = Request(
        id="e", tokens=prompt(1, 9), sampling=SamplingParams(temperature=0, max_tokens=12)
    )
    _, done = run(eos, init(eos), [heeding, item])
    assert len(done["e"].tokens) == tokens.index(tokens[2]) + 1
    assert done["x"].tokens.tolist() == tokens, "ignore_eos goes on"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 256 ids and two special ones."""
    backend = Tokenizer(models.BPE(vocab=dict(byte_alphabet()), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_bytes_behind_tokens_of_a_byte_level_vocabulary() -> None:
    tokenizer = byte_tokenizer()
    table = token_table(tokenizer)
    for text in ("plain", "naïve 日本 🙂\n\ttabs", "\x00\x7f"):
        ids = tokenizer.encode(text)
        assert b"".join(table.pieces[i] for i in ids) == text.encode()
    assert table.pieces[tokenizer.eos_token_id] == b""


def test_bytes_behind_tokens_of_a_sentencepiece_vocabulary() -> None:
    vocabulary = [("<unk>", 0.0), ("▁the", -1.0), ("▁", -2.0), ("cat", -1.0)]
    vocabulary += [(f"<0x{b:02X}>", -9.0) for b in range(256)]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    table = token_table(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert table.pieces[1] + table.pieces[2] + table.pieces[3] == b" the cat"
    assert table.pieces[4 + 0xE2] == b"\xe2"


def test_prepare_takes_text_and_messages() -> None:
    tokenizer = byte_tokenizer()
    program = tiny_program(sizes={"vocab_size": 257}, tokenizer=tokenizer)
    plain = prepare(program, "hi", id="1", adapter="x", salt="s")
    assert plain.tokens == tokenizer.encode("hi")
    assert (plain.adapter, plain.salt) == ("x", "s")
    chat = prepare(program, [{"role": "user", "content": "hi"}], id="2")
    assert tokenizer.decode(chat.tokens) == "<user>hi<assistant>"
    thinks = {"think": True}
    chat = prepare(
        program, [{"role": "user", "content": "hi"}], id="2", chat_template_kwargs=thinks
    )
    assert tokenizer.decode(chat.tokens) == "<user>hi<assistant>hm"
    tokenizer.chat_template = None
    with pytest.raises(RequestError, match="chat template"):
        prepare(program, [{"role": "user", "content": "hi"}], id="2")


def test_the_checkpoints_generation_config_is_the_default(tmp_path: Path) -> None:
    """What the file asks for is what `prepare` asks for, and end tokens come from it too."""
    folder = shutil.copytree(checkpoint()[0], tmp_path / "model")
    words = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1}
    words |= {"repetition_penalty": 1.1, "eos_token_id": [5, 7]}
    (folder / "generation_config.json").write_text(json.dumps(words))
    program = load_program(folder, device="cpu", num_blocks=8)
    assert program.config.stop_ids == (5, 7)
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        assert getattr(program.defaults, name) == words[name]
    program = replace(program, tokenizer=byte_tokenizer())
    assert prepare(program, "a", id="1").sampling is program.defaults
    assert prepare(program, "a", id="1", sampling=SamplingParams(top_k=3)).sampling.top_k == 3
    (folder / "generation_config.json").unlink()
    assert load_program(folder, device="cpu", num_blocks=8).defaults.temperature == 1.0


def test_text_never_holds_half_a_character() -> None:
    """SL-03: the prompt is not in the text; an unfinished tail shows once, at the end."""
    pieces = ["é".encode()[:1], "é".encode()[1:], *[b"x"] * 126]
    program = tiny_program(tokens=TokenTable(pieces))
    state = submit(init(program), request("x", [0, 0], max_tokens=1))
    _, outputs = step(program, state)
    assert outputs.finished[0].text in ("x", "\N{REPLACEMENT CHARACTER}")
    assert program.config.tokens.text(np.array([0, 1, 5])) == "éx"
