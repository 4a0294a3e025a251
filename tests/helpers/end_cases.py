"""Generated answers with ends in them, and what has to come out, by definition."""

import codecs
from dataclasses import dataclass

import numpy as np

from foreword.acceptance.params import SamplingParams
from helpers.byte_pieces import CONTROL, EOS, OTHER_EOS, PIECES
from helpers.scripted_target import PROMPT_LEN

VOCAB = len(PIECES)
END_IDS = frozenset({EOS, OTHER_EOS})
SCRIPT_LEN = 26
STOP_TEXTS = (
    "ab",
    "ba",
    "abc",
    "bca",
    "aa",
    "xa",
    "é",
    "😀b",
    "a\n",
    " ",
    "cc",
    "cab",
    "b\nx",
    "x a",
    "\ufffd",
)


@dataclass(frozen=True)
class Expected:
    """An answer."""

    tokens: list[int]
    text: str
    finish_reason: str
    stop_reason: int | str | None


@dataclass(frozen=True)
class EndCase:
    """What the target would say for ever, and where that has to end."""

    script: np.ndarray  # int64 [SCRIPT_LEN]
    second: np.ndarray  # int64 [SCRIPT_LEN], what is said where the script's token is forbidden
    params: SamplingParams
    context_length: int

    @staticmethod
    def draw(rng: np.random.Generator, context_length: int) -> "EndCase":
        script = rng.integers(CONTROL, VOCAB, SCRIPT_LEN)
        place = rng.integers(0, 18)
        stop_ids = tuple(int(t) for t in rng.integers(CONTROL, VOCAB, rng.choice([0, 0, 1, 2])))
        if rng.random() < 0.5:
            script[place] = rng.choice([EOS, OTHER_EOS])
        max_tokens = int(rng.integers(1, 20))
        keep = bool(rng.random() < 0.3)
        texts = () if keep and stop_ids else rng.choice(STOP_TEXTS, rng.choice([0, 1, 1, 3]))
        params = SamplingParams(
            temperature=0,
            frequency_penalty=0.01,
            max_tokens=max_tokens,
            min_tokens=int(rng.integers(0, max_tokens + 1)) if rng.random() < 0.3 else 0,
            stop=tuple(str(text) for text in texts),
            include_stop_str_in_output=keep,
            stop_token_ids=stop_ids,
            ignore_eos=bool(rng.random() < 0.2),
            logprobs=int(rng.integers(0, 3)) if rng.random() < 0.2 else None,
        )
        harmless = [t for t in range(CONTROL, VOCAB) if t not in stop_ids]
        return EndCase(script, rng.choice(harmless, SCRIPT_LEN), params, context_length)

    def token(self, place: int) -> int:
        """What the answer has there if it goes on so far."""
        ends = {*END_IDS, *self.params.stop_token_ids}
        said = int(self.script[place])
        return int(self.second[place]) if place < self.params.min_tokens and said in ends else said

    def expected(self) -> Expected:
        """The definition, one token after the other."""
        params = self.params
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else END_IDS)}
        most = min(params.max_tokens, self.context_length - PROMPT_LEN)
        tokens: list[int] = []
        for place in range(most):
            before = len(certain_text(tokens))
            tokens.append(self.token(place))
            if tokens[-1] in stop_ids:
                chosen = tokens[-1] in params.stop_token_ids
                spoken = tokens if chosen and params.include_stop_str_in_output else tokens[:-1]
                return Expected(tokens, whole_text(spoken), "stop", tokens[-1] if chosen else None)
            found = self._stop_text(certain_text(tokens), before) if place >= params.min_tokens else None
            if found is not None:
                return Expected(tokens, found[0], "stop", found[1])
        return Expected(tokens, whole_text(tokens), "length", None)

    def _stop_text(self, text: str, before: int) -> tuple[str, str] | None:
        for end in range(before + 1, len(text) + 1):
            complete = [stop for stop in self.params.stop_texts if text[:end].endswith(stop)]
            if complete:
                stop = max(complete, key=len)
                return text[: end if self.params.include_stop_str_in_output else end - len(stop)], stop
        return None


def certain_text(tokens: list[int]) -> str:
    """What these tokens say whatever follows them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return decoder.decode(b"".join(PIECES[token] for token in tokens))


def whole_text(tokens: list[int]) -> str:
    """What these tokens say if nothing follows them."""
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")
