"""Lets the target write conversations: user messages, answers, passages, and questions about passages."""

import json
import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.train.texts.batches import Job
from foreword.train.texts.documents import Document, make_document
from foreword.train.texts.prompts import ChatPieces, FilePrompt, chat_pieces

SEEDS: dict[str, Any] = json.loads(
    (files("foreword.train") / "data" / "seeds.json").read_text(encoding="utf-8")
)
"""Beginnings of prompts, which the model completes as a user would.

{word} is an ordinary word of the model's vocabulary, {name} a first name, {text} one or more passages.
"""

KIND_WEIGHTS = {
    "chat": 25, "code": 12, "math": 11, "qa": 13, "translation": 7, "passage": 5, "summary": 15, "rag": 12, "prompts": 9
}  # fmt: skip
_ANSWER_LENGTHS = (96, 128, 128, 192, 256, 320)
_PASSAGES_KEPT = 4096
_SHORTEST_PASSAGE = 60  # tokens
_OUTSIDE_OF_CHATS = 0.6
"""Fraction of passages written outside conversations, since an assistant's are easier to predict than a user's."""
_LEAST_ROOM = 8  # minimum tokens of an answer
_WORD = re.compile(rb" [a-z]{4,12}")


@dataclass(frozen=True)
class WritingLimits:
    """Length limits of texts."""

    context: int  # prompt and answer together
    passage: int = 420  # tokens of a passage
    user_turn: int = 160


@dataclass(frozen=True)
class _Talk:
    """A conversation in progress."""

    tokens: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]  # token ranges
    kind: str
    rest: tuple[str, ...] = ()  # further user messages of a prompt from a file


class Writer:
    """An endless iterator over jobs, which passes finished conversations to `emit`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: WritingLimits,
        emit: Callable[[Document], None],
        *,
        prompts: Sequence[FilePrompt] = (),
        only_prompts: bool = False,
        seed: int = 0,
    ) -> None:
        """Create the iterator; `only_prompts` restricts conversations to `prompts`."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._emit = emit
        self._random = random.Random(seed)
        self._pieces: ChatPieces = chat_pieces(tokenizer, SEEDS["system_prompts"])
        self._words = [word.decode() for word in _words(tokenizer)] or ["something"]
        self._prompts = prompts
        self._passages: deque[list[int]] = deque(maxlen=_PASSAGES_KEPT)
        self._next: deque[Job] = deque()
        weights = {kind: weight for kind, weight in KIND_WEIGHTS.items() if kind != "prompts" or prompts}
        if only_prompts:
            weights = {"prompts": 1}
        self._kinds, self._weights = list(weights), list(weights.values())

    def __iter__(self) -> "Writer":
        return self

    def __next__(self) -> Job:
        while not self._next:
            self._begin(self._random.choices(self._kinds, self._weights)[0])
        return self._next.popleft()

    def _begin(self, kind: str) -> None:
        """Queue the first job of a new conversation."""
        choose = self._random.choice
        if kind in ("summary", "rag") and not self._passages:
            kind = "passage"
        match kind:
            case "passage" if self._random.random() < _OUTSIDE_OF_CHATS:
                self._write_document(self._encode(choose(SEEDS["documents"])))
            case "passage":
                self._ask(self._encode(choose(SEEDS["passages"])), kind)
            case "prompts":
                self._begin_from_file(choose(self._prompts))
            case "summary":
                self._ask(self._about_passages(choose(SEEDS["summary_orders"])), kind)
            case "rag":
                self._write_user(self._about_passages(choose(SEEDS["question_orders"])), kind, 32)
            case "translation":
                language = choose([*["German"] * 5, *SEEDS["sentences"]])
                order = choose(SEEDS["translation_orders"]).replace("German", language)
                text = order.replace("{language}", language) + choose(SEEDS["sentences"][language])
                self._write_user(self._encode(text), kind, 64)
            case _:
                longest = {"qa": 24, "math": 96}.get(kind, self._limits.user_turn)
                self._write_user(self._encode(choose(SEEDS[kind])), kind, longest)

    def _begin_from_file(self, prompt: FilePrompt) -> None:
        """Answer a prompt of a file, with its system prompt or the template's default opening."""
        tokens = self._tokenizer.encode_chat(prompt.messages())
        self._answer(_Talk(tuple(tokens), (), prompt.kind, prompt.turns[1:]))

    def _encode(self, seed: str) -> list[int]:
        """Return the tokens of a beginning without its final space, which would be an unusual token."""
        for slot, options in (("{word}", self._words), ("{name}", SEEDS["names"])):
            while slot in seed:
                seed = seed.replace(slot, self._random.choice(options), 1)
        return self._tokenizer.encode(seed.rstrip(" "), add_special_tokens=False)

    def _about_passages(self, order: str) -> list[int]:
        """Return an instruction with stored passages inserted, several short ones or a long one."""
        room = max(self._limits.context - 300, 16)
        wanted = self._random.randint(min(150, room), room)
        text: list[int] = []
        while not text or (len(text) < wanted and self._random.random() < 0.8):
            text += self._random.choice(self._passages)
        before, _, after = order.partition("{text}")
        return self._encode(before) + text[:wanted] + self._encode(after)

    def _opening(self) -> tuple[int, ...]:
        """Return the template's default opening in most cases, otherwise one with a system prompt."""
        openings = self._pieces.openings
        return openings[0] if self._random.random() < 0.7 else self._random.choice(openings)

    def _write_user(self, beginning: list[int], kind: str, longest: int) -> None:
        """Generate the rest of a user message, then the answer."""
        self._continue_as_user(_Talk(self._opening(), (), kind), beginning, longest)

    def _continue_as_user(self, talk: _Talk, beginning: list[int], longest: int) -> None:
        prompt = [*talk.tokens, *beginning]

        def done(written: list[int]) -> None:
            words = beginning + [token for token in written if token not in self._tokenizer.eos_ids]
            if words:
                self._answer(_Talk((*talk.tokens, *words, *self._pieces.to_answer), talk.answers, talk.kind))

        self._queue(prompt, longest, self._random.uniform(0.6, 1.0), done)

    def _write_document(self, beginning: list[int]) -> None:
        """Generate a passage outside any conversation, like an article of a web page."""
        temperature = self._random.uniform(0.8, 1.0)

        def done(written: list[int]) -> None:
            text = [*beginning, *written]
            document = make_document(text, [(len(beginning), len(text))], "passage", temperature)
            self._keep_passage(document, text)
            self._emit(document)

        self._queue(
            beginning, self._random.randint(_SHORTEST_PASSAGE, 2 * self._limits.passage), temperature, done
        )

    def _ask(self, words: list[int], kind: str) -> None:
        self._answer(_Talk((*self._opening(), *words, *self._pieces.to_answer), (), kind))

    def _answer(self, talk: _Talk) -> None:
        """Generate an answer, greedily in half of the cases, since most requests are greedy."""
        is_passage = talk.kind == "passage"
        temperature = (
            0.0 if self._random.random() < 0.5 and not is_passage else self._random.uniform(0.3, 1.0)
        )
        length = self._limits.passage if is_passage else self._random.choice(_ANSWER_LENGTHS)

        def done(written: list[int]) -> None:
            begin = len(talk.tokens)
            answers = (*talk.answers, (begin, begin + len(written)))
            whole = _Talk((*talk.tokens, *written), answers, talk.kind, talk.rest)
            self._finish(whole, written, temperature)

        self._queue(list(talk.tokens), length, temperature, done)

    def _finish(self, talk: _Talk, written: list[int], temperature: float) -> None:
        ended = bool(written) and written[-1] in self._tokenizer.eos_ids
        document = make_document(talk.tokens, talk.answers, talk.kind, temperature)
        if talk.kind == "passage":
            self._keep_passage(document, written)
        if talk.rest and ended and self._says_next(talk, written):
            return
        goes_on = not talk.rest and ended and len(talk.answers) < 3 and self._random.random() < 0.2
        if goes_on and len(talk.tokens) + 2 * max(_ANSWER_LENGTHS) < self._limits.context:
            beginning = self._encode(self._random.choice(SEEDS["follow_ups"]))
            tokens = (*talk.tokens, *self._pieces.after_answer(written))
            self._continue_as_user(_Talk(tokens, talk.answers, talk.kind), beginning, 48)
            return
        self._emit(document)

    def _keep_passage(self, document: Document, text: Sequence[int]) -> None:
        """Save a passage for summaries and questions, unless it is held out."""
        if len(text) > _SHORTEST_PASSAGE and not document.held_out:
            self._passages.append([token for token in text if token not in self._tokenizer.eos_ids])

    def _says_next(self, talk: _Talk, written: list[int]) -> bool:
        """Continue with the next user message of a file's prompt; return whether there is room."""
        words = self._tokenizer.encode(talk.rest[0], add_special_tokens=False)
        tokens = (*talk.tokens, *self._pieces.after_answer(written), *words, *self._pieces.to_answer)
        if len(tokens) + _LEAST_ROOM > self._limits.context:
            return False
        self._answer(_Talk(tokens, talk.answers, talk.kind, talk.rest[1:]))
        return True

    def _queue(
        self, prompt: list[int], longest: int, temperature: float, done: Callable[[list[int]], None]
    ) -> None:
        """Queue a job if there is room for it."""
        room = self._limits.context - len(prompt)
        if prompt and room >= _LEAST_ROOM:
            self._next.append(Job(prompt, min(longest, room), temperature, done))


def _words(tokenizer: Tokenizer) -> list[bytes]:
    """Return ordinary words that are one token."""
    pieces = (tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
    return [piece[1:] for piece in pieces if _WORD.fullmatch(piece)]
