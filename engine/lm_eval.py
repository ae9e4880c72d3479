"""A backend for lm-evaluation-harness: `python -m purestep.engine.lm_eval --model purestep ...`.

The module registers the backend under the name `purestep` and is the harness's own command line
otherwise: up to version 0.4.13 the harness looks for models in its own package alone. Later ones
find the entry point in the group `lm_eval.models`, so that there `lm_eval --model purestep` will
do. A notebook imports the module and calls `lm_eval.simple_evaluate(model="purestep", ...)`.
Arguments: `pretrained`, the checkpoint folder; `adapter`, a PEFT folder; `max_length`,
`max_gen_toks`, and the options of `load_program`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import lm_eval.models  # noqa: F401  (the harness's own, which it names only in an empty registry)
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from purestep.engine.generate import generate
from purestep.engine.program import load_program
from purestep.state.request import Completion, Request
from purestep.state.sampling import SamplingParams

ADAPTER = "adapter"  # what the one adapter is called inside
SCORE = SamplingParams(max_tokens=0, prompt_logprobs=1)


@register_model("purestep")
class PurestepLM(TemplateLM):
    """One program, and all requests of a task in one continuous batch."""

    def __init__(
        self,
        pretrained: str,
        adapter: str | None = None,
        *,
        device: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(batch_size, int) and batch_size > 1:
            options.setdefault("max_rows", batch_size)
        self.program = load_program(
            pretrained, device=device or "auto", max_context=max_length, **options
        )
        self.tokenizer = self.program.tokenizer
        self.adapters = {} if adapter is None else {ADAPTER: adapter}
        self.max_length = self.program.config.max_context
        self.max_gen_toks = max_gen_toks
        del max_batch_size  # batches are continuous

    @property
    def eot_token_id(self) -> int:
        """What ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        """What the harness keys cached chat prompts on."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids; by default with the tokenizer's special tokens, as the `hf` backend has it,
        unless the text has the first of them already."""
        first = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (first and string.startswith(first))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat."""
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """(logprob of the continuation, whether it is the greedy one) of (_, context,
        continuation); of what is longer than the context the end is read."""
        pairs = []
        for _words, context, continuation in requests:
            tokens = [*context, *continuation][-self.max_length :]
            pairs.append((tokens, min(len(continuation), len(tokens) - 1)))
        items = [self._request(at, tokens, SCORE) for at, (tokens, _) in enumerate(pairs)]
        found: list[tuple[float, bool]] = []
        for done, (tokens, count) in zip(self._run(items, disable_tqdm), pairs, strict=True):
            logprobs = done.prompt_logprobs[len(tokens) - count :]
            likeliest = done.prompt_top_ids[len(tokens) - count :, 0]
            is_greedy = bool(np.array_equal(likeliest, tokens[len(tokens) - count :]))
            found.append((float(logprobs.sum(dtype=np.float64)), is_greedy))
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The logprob of each whole text; long ones are read in windows."""
        windows, owners = [], []
        for at, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in self._windows(tokens):
                windows.append(window)
                owners.append(at)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (logprob, _) in zip(owners, scores, strict=True):
            totals[owner] += logprob
        return totals

    def _windows(self, tokens: list[int]) -> Iterator[tuple[None, list[int], list[int]]]:
        """As the harness cuts a text: one token of context each, the last window filled up."""
        prefix, size = self.prefix_token_id, self.max_length - 1  # one of ours holds what is scored
        for window in get_rolling_token_windows(tokens, prefix, size, 1):
            context, scored = make_disjoint_window(window)
            yield None, context, scored

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy texts, or drawn ones where a task asks for it, up to the first of `until`."""
        items = []
        for at, request in enumerate(requests):
            text, asked = request.args
            sampling = self._sampling(dict(asked))
            room = self.max_length - sampling.max_tokens
            items.append(self._request(at, self.tok_encode(text)[-room:], sampling))
        return [done.text for done in self._run(items, disable_tqdm)]

    def _sampling(self, asked: dict[str, Any]) -> SamplingParams:
        until = asked.pop("until", None) or []
        until = [until] if isinstance(until, str) else list(until)
        most = asked.pop("max_gen_toks", asked.pop("max_new_tokens", self.max_gen_toks))
        drawn = asked.pop("do_sample", False)
        warmth = asked.pop("temperature", 1.0) if drawn else 0.0
        asked.pop("temperature", None)
        known = {
            name: asked[name] for name in ("top_p", "top_k", "min_p") if drawn and name in asked
        }
        sampling = SamplingParams(
            temperature=warmth,
            max_tokens=min(most, self.max_length - 1),
            stop=tuple(word for word in until if word),
        )
        return replace(sampling, **known)

    def _request(self, at: int, tokens: list[int], sampling: SamplingParams) -> Request:
        adapter = ADAPTER if self.adapters else None
        return Request(id=f"{at}", tokens=tokens, adapter=adapter, sampling=sampling)

    def _run(self, items: list[Request], disable_tqdm: bool) -> list[Completion]:
        """Completions in the order of the requests. Raises RuntimeError where one fails."""
        found: dict[str, Completion] = {}
        for done in generate(
            self.program, items, adapters=self.adapters, progress=not disable_tqdm
        ):
            if done.error is not None:
                raise RuntimeError(done.error)
            found[done.id] = done
        return [found[item.id] for item in items]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
