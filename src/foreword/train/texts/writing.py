"""Lets the target write conversations: user messages, answers, passages, and questions about passages."""

import json
import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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

{word} stands for an ordinary word of the model's vocabulary, {name} for a first name, {text} for passages.
"""

KIND_WEIGHTS = {
    "chat": 25, "code": 12, "math": 11, "qa": 13, "translation": 7, "passage": 5, "summary": 15, "rag": 12, "prompts": 9
}  # fmt: skip
"""Relative frequency of each kind of conversation; "prompts" are those of the user's prompt files."""
_ANSWER_LENGTHS = (96, 128, 128, 192, 256, 320)  # maximum tokens, drawn per answer
_MAX_PASSAGES = 4096  # stored for summaries and questions; the oldest are dropped
_SHORTEST_PASSAGE = 60  # tokens
# Fraction of passages that are written without a chat template. They are as hard to predict as texts by users, and
# harder than an assistant's answers.
_PLAIN_PASSAGES = 0.6
_LEAST_ROOM = 8  # minimum number of tokens for an answer
_WORD = re.compile(rb" [a-z]{4,12}")


@dataclass(frozen=True)
class WritingLimits:
    """Length limits of texts."""

    context: int  # maximum tokens of a conversation
    passage: int = 420  # maximum tokens of a passage; without a chat template, up to twice as many
    user_turn: int = 160  # maximum generated tokens of a user message


@dataclass(frozen=True)
class _Conversation:
    """A conversation in progress."""

    tokens: tuple[int, ...]
    answers: tuple[tuple[int, int], ...]  # token ranges (begin, end)
    kind: str
    user_messages: tuple[str, ...] = ()  # the next user messages; only prompts from a file have these


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
        self._passages: deque[list[int]] = deque(maxlen=_MAX_PASSAGES)
        self._jobs: deque[Job] = deque()
        weights = {kind: weight for kind, weight in KIND_WEIGHTS.items() if kind != "prompts" or prompts}
        if only_prompts:
            weights = {"prompts": 1}
        self._kinds, self._weights = list(weights), list(weights.values())

    def __iter__(self) -> "Writer":
        return self

    def __next__(self) -> Job:
        while not self._jobs:
            self._begin(self._random.choices(self._kinds, self._weights)[0])
        return self._jobs.popleft()

    def _begin(self, kind: str) -> None:
        """Queue the first job of a new conversation."""
        choose = self._random.choice
        if kind in ("summary", "rag") and not self._passages:
            kind = "passage"
        match kind:
            case "passage" if self._random.random() < _PLAIN_PASSAGES:
                self._write_document(self._encode(choose(SEEDS["documents"])))
            case "passage":
                self._ask(self._encode(choose(SEEDS["passages"])), kind)
            case "prompts":
                prompt = choose(self._prompts)
                tokens = tuple(self._tokenizer.encode_chat(prompt.messages()))
                self._answer(_Conversation(tokens, (), prompt.kind, prompt.turns[1:]))
            case "summary":
                self._ask(self._about_passages(choose(SEEDS["summary_instructions"])), kind)
            case "rag":
                self._write_user(self._about_passages(choose(SEEDS["question_instructions"])), kind, 32)
            case "translation":
                # Translations into English, more than half of them from German. Some instructions name German instead
                # of {language}.
                language = choose([*["German"] * 5, *SEEDS["sentences"]])
                instruction = choose(SEEDS["translation_instructions"]).replace("German", language)
                text = instruction.replace("{language}", language) + choose(SEEDS["sentences"][language])
                self._write_user(self._encode(text), kind, 64)
            case _:
                longest = {"qa": 24, "math": 96}.get(kind, self._limits.user_turn)
                self._write_user(self._encode(choose(SEEDS[kind])), kind, longest)

    def _encode(self, seed: str) -> list[int]:
        """Return the tokens of a seed text with its placeholders filled in, without a final space.

        A final space would be an unusual token.
        """
        for placeholder, options in (("{word}", self._words), ("{name}", SEEDS["names"])):
            while placeholder in seed:
                seed = seed.replace(placeholder, self._random.choice(options), 1)
        return self._tokenizer.encode(seed.rstrip(" "), add_special_tokens=False)

    def _about_passages(self, instruction: str) -> list[int]:
        """Return the tokens of an instruction with one or more stored passages inserted at {text}."""
        room = max(self._limits.context - 300, 16)
        longest = self._random.randint(min(150, room), room)
        text: list[int] = []
        while not text or (len(text) < longest and self._random.random() < 0.8):
            text += self._random.choice(self._passages)
        prefix, _, suffix = instruction.partition("{text}")
        return self._encode(prefix) + text[:longest] + self._encode(suffix)

    def _opening(self) -> tuple[int, ...]:
        """Return the token ids before the first user message: usually the template's default."""
        openings = self._pieces.openings
        return openings[0] if self._random.random() < 0.7 else self._random.choice(openings)

    def _write_user(self, beginning: list[int], kind: str, longest: int) -> None:
        """Start a conversation: queue the rest of its first user message, then the answer."""
        self._continue_as_user(_Conversation(self._opening(), (), kind), beginning, longest)

    def _continue_as_user(self, conversation: _Conversation, beginning: list[int], longest: int) -> None:
        """Queue the rest of the next user message, then the answer."""
        prompt = [*conversation.tokens, *beginning]

        def done(written: list[int]) -> None:
            message = beginning + [token for token in written if token not in self._tokenizer.eos_ids]
            if message:
                tokens = (*conversation.tokens, *message, *self._pieces.to_answer)
                self._answer(replace(conversation, tokens=tokens))

        self._queue(prompt, longest, self._random.uniform(0.6, 1.0), done)

    def _write_document(self, beginning: list[int]) -> None:
        """Queue a passage without a chat template, like an article on a web page."""
        temperature = self._random.uniform(0.8, 1.0)

        def done(written: list[int]) -> None:
            text = [*beginning, *written]
            document = make_document(text, [(len(beginning), len(text))], "passage", temperature)
            self._keep_passage(document, text)
            self._emit(document)

        longest = self._random.randint(_SHORTEST_PASSAGE, 2 * self._limits.passage)
        self._queue(beginning, longest, temperature, done)

    def _ask(self, message: list[int], kind: str) -> None:
        """Start a conversation with a complete user message (token ids), and queue the answer."""
        self._answer(_Conversation((*self._opening(), *message, *self._pieces.to_answer), (), kind))

    def _answer(self, conversation: _Conversation) -> None:
        """Queue an answer: half of them greedy, since many requests are greedy; passages are always sampled."""
        is_passage = conversation.kind == "passage"
        is_greedy = self._random.random() < 0.5 and not is_passage
        temperature = 0.0 if is_greedy else self._random.uniform(0.3, 1.0)
        length = self._limits.passage if is_passage else self._random.choice(_ANSWER_LENGTHS)

        def done(written: list[int]) -> None:
            begin = len(conversation.tokens)
            answers = (*conversation.answers, (begin, begin + len(written)))
            extended = replace(conversation, tokens=(*conversation.tokens, *written), answers=answers)
            self._finish(extended, written, temperature)

        self._queue(list(conversation.tokens), length, temperature, done)

    def _finish(self, conversation: _Conversation, written: list[int], temperature: float) -> None:
        """Continue a conversation after an answer, or emit it."""
        has_ended = bool(written) and written[-1] in self._tokenizer.eos_ids
        document = make_document(conversation.tokens, conversation.answers, conversation.kind, temperature)
        if conversation.kind == "passage":
            self._keep_passage(document, written)
        if conversation.user_messages and has_ended and self._ask_next(conversation, written):
            return
        may_go_on = not conversation.user_messages and has_ended and len(conversation.answers) < 3
        has_room = len(conversation.tokens) + 2 * max(_ANSWER_LENGTHS) < self._limits.context
        if may_go_on and self._random.random() < 0.2 and has_room:
            beginning = self._encode(self._random.choice(SEEDS["follow_ups"]))
            tokens = (*conversation.tokens, *self._pieces.after_answer(written))
            self._continue_as_user(replace(conversation, tokens=tokens), beginning, 48)
            return
        self._emit(document)

    def _keep_passage(self, document: Document, text: Sequence[int]) -> None:
        """Store a passage for summaries and questions, unless it is held out."""
        if len(text) > _SHORTEST_PASSAGE and not document.held_out:
            self._passages.append([token for token in text if token not in self._tokenizer.eos_ids])

    def _ask_next(self, conversation: _Conversation, written: list[int]) -> bool:
        """Queue the answer to the next user message of a prompt from a file; return whether there is room for it."""
        message = self._tokenizer.encode(conversation.user_messages[0], add_special_tokens=False)
        tokens = (
            *conversation.tokens,
            *self._pieces.after_answer(written),
            *message,
            *self._pieces.to_answer,
        )
        if len(tokens) + _LEAST_ROOM > self._limits.context:
            return False
        self._answer(replace(conversation, tokens=tokens, user_messages=conversation.user_messages[1:]))
        return True

    def _queue(
        self, prompt: list[int], longest: int, temperature: float, done: Callable[[list[int]], None]
    ) -> None:
        """Queue a job if the context has room for an answer; `longest` is its maximum number of tokens."""
        room = self._limits.context - len(prompt)
        if prompt and room >= _LEAST_ROOM:
            self._jobs.append(Job(prompt, min(longest, room), temperature, done))


def _words(tokenizer: Tokenizer) -> list[bytes]:
    """Return lower-case words of 4 to 12 letters that are one token, without the space before them."""
    pieces = (tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size))
    return [piece[1:] for piece in pieces if _WORD.fullmatch(piece)]
