"""What a batch run writes: one JSON object a line, of the input's own form. Pure.

Every record starts with the line's number and digest, which a resumed run reads. A logprob of
minus infinity is written as -9999.0, as OpenAI does; no other number that JSON lacks occurs.
"""

import codecs
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from purestep.engine.batch_rows import Row
from purestep.state.errors import BatchLineError
from purestep.state.request import Completion, logprob_dicts, prompt_logprob_dicts
from purestep.state.text import TokenTable

NEVER = -9999.0  # in place of minus infinity
SPLITTERS = str.maketrans({c: f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"})
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _head(line: int, digest: int, dry_run: bool) -> dict[str, Any]:
    """The fields that every record starts with."""
    head: dict[str, Any] = {"line": line, "digest": f"{digest:016x}"}
    return head | {"dry_run": True} if dry_run else head


def failed_record(
    line: int, digest: int, custom_id: str | None, error: BatchLineError, *, dry_run: bool = False
) -> dict[str, Any]:
    """The record of a line that has no result."""
    cause = {"code": error.code, "message": str(error), "status": error.status, "line": line}
    told = {"custom_id": custom_id, "response": None, "error": cause}
    return _head(line, digest, dry_run) | told


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordMaker:
    """What stays the same for all results of a run."""

    tokens: TokenTable | None
    created: int  # unix time; of the input file, so that a run that is repeated writes the same
    fingerprint: str  # of the weights
    dry_run: bool = False

    def done(
        self,
        line: int,
        digest: int,
        row: Row,
        prompt_N: Sequence[int] | np.ndarray,
        samples: Sequence[Completion],
    ) -> dict[str, Any]:
        """The record of a line whose `samples`, in order, have all finished."""
        head, named = _head(line, digest, self.dry_run), {"custom_id": row.custom_id}
        usage = {
            "prompt_tokens": samples[0].num_prompt_tokens,
            "completion_tokens": sum(len(sample.tokens) for sample in samples),
        }
        if row.form == "plain":
            outputs = [self._output(sample, row, prompt_N) for sample in samples]
            found = {"adapter": row.adapter, "outputs": outputs, "usage": usage}
            return head | named | found | {"error": None}
        name = f"{line}-{digest:016x}"
        usage["total_tokens"] = sum(usage.values())
        choices = [self._choice(sample, row, prompt_N) for sample in samples]
        kind, prefix = KINDS[row.form]
        body = {
            "id": f"{prefix}-{name}",
            "object": kind,
            "created": self.created,
            "model": row.model,
            "choices": choices,
            "usage": usage,
            "system_fingerprint": self.fingerprint,
        }
        response = {"status_code": 200, "request_id": f"req-{name}", "body": body}
        found = {"id": f"batch_req-{name}", **named, "response": response, "error": None}
        return head | found

    def _choice(self, sample: Completion, row: Row, prompt_N: Any) -> dict[str, Any]:
        chat = row.form == "chat"
        said = {"message": {"role": "assistant", "content": sample.text}} if chat else {}
        told = {} if chat else {"text": sample.text}
        wanted = "logprobs" in row.sampling
        scores = (self._chat_scores if chat else self._text_scores)(sample) if wanted else None
        choice = {"index": sample.index, **said, **told, "logprobs": scores}
        choice["finish_reason"] = sample.finish_reason.value
        return choice | self._prompt_scores(sample, row, prompt_N)

    def _output(self, sample: Completion, row: Row, prompt_N: Any) -> dict[str, Any]:
        output = {
            "text": sample.text,
            "tokens": sample.tokens.tolist(),
            "finish_reason": sample.finish_reason.value,
            "stop": sample.stop,
        }
        if "logprobs" in row.sampling:
            output["logprobs"] = [_finite(scores) for scores in logprob_dicts(sample)]
        return output | self._prompt_scores(sample, row, prompt_N)

    def _prompt_scores(self, sample: Completion, row: Row, prompt_N: Any) -> dict[str, Any]:
        if "prompt_logprobs" not in row.sampling or sample.index:
            return {}
        return {"prompt_logprobs": [_finite(x) for x in prompt_logprob_dicts(sample, prompt_N)]}

    def _chat_scores(self, sample: Completion) -> dict[str, Any]:
        content = []
        for token, scores in zip(sample.tokens.tolist(), logprob_dicts(sample), strict=True):
            num_tops = 0 if sample.top_ids is None else sample.top_ids.shape[1]
            tops = [self._scored(*pair) for pair in _likeliest(scores, num_tops)]
            content.append(self._scored(token, scores[token]) | {"top_logprobs": tops})
        return {"content": content}

    def _text_scores(self, sample: Completion) -> dict[str, Any]:
        tokens = sample.tokens.tolist()
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        lengths = [len(decoder.decode(self._piece(token))) for token in tokens]
        num_tops = 0 if sample.top_ids is None else sample.top_ids.shape[1]
        return {
            "tokens": [self._text(token) for token in tokens],
            "token_logprobs": [_number(x) for x in sample.logprobs.tolist()],
            "top_logprobs": [
                {self._text(token): _number(x) for token, x in _likeliest(scores, num_tops)}
                for scores in logprob_dicts(sample)
            ],
            "text_offset": [0, *accumulate(lengths)][:-1],
        }

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        text, piece = self._text(token), self._piece(token)
        return {"token": text, "logprob": _number(logprob), "bytes": list(piece)}

    def _piece(self, token: int) -> bytes:
        return self.tokens.piece(token) if self.tokens else str(token).encode()

    def _text(self, token: int) -> str:
        """What a token adds; of one that is no whole characters its bytes, as OpenAI names it, so
        that no two have one name."""
        piece = self._piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


KINDS = {"chat": ("chat.completion", "chatcmpl"), "completion": ("text_completion", "cmpl")}


def encoded(record: Mapping[str, Any]) -> bytes:
    """One line of UTF-8, ended by a newline, without a character that any reader splits lines at.

    Raises ValueError for a number that JSON lacks, or half of a surrogate pair.
    """
    text = ENCODER.encode(record)
    return (text if text.isascii() else text.translate(SPLITTERS)).encode() + b"\n"


def _likeliest(scores: Mapping[int, float], count: int) -> list[tuple[int, float]]:
    """The `count` likeliest; the chosen token, which comes first, may or may not be one."""
    return sorted(scores.items(), key=lambda pair: -pair[1])[:count]


def _finite(scores: Mapping[int, float] | None) -> dict[str, float] | None:
    return None if scores is None else {str(token): _number(x) for token, x in scores.items()}


def _number(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else NEVER
