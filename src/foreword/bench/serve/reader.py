"""Reads one streamed answer into an outcome."""

from foreword.bench.serve.chunks import DONE, Chunk, parse_chunk
from foreword.bench.serve.outcome import ContentChunk, Outcome
from foreword.wire.openai_http import EventParser


class AnswerReader:
    """Takes the bytes of an answer with the times of their arrival; all events of one arrival have its time."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self._events = EventParser()
        self._counted = 0  # output tokens by the usage of the last chunk that had one
        self._waiting: int | None = None  # tokens that have come and whose text has not
        self.is_finished = False  # the answer is whole: a finish reason or [DONE] was there

    def take(self, received: bytes, time: float) -> None:
        """Read on; ValueError or ServerReportedError if this is no answer."""
        for data in self._events.feed(received):
            if data.strip() == DONE:
                self.is_finished = True
            else:
                self._take_chunk(parse_chunk(data), time)

    def _take_chunk(self, chunk: Chunk, time: float) -> None:
        outcome = self._outcome
        if chunk.prompt_tokens is not None:
            outcome.prompt_tokens = chunk.prompt_tokens
        tokens = self._tokens_of(chunk)
        if not chunk.has_choice:
            return
        outcome.last = time
        if tokens is not None:
            self._waiting = (self._waiting or 0) + tokens
        if chunk.has_content:
            outcome.chunks.append(ContentChunk(time, self._waiting if tokens is not None else None))
            self._waiting = None
        self.is_finished |= chunk.finish_reason is not None

    def _tokens_of(self, chunk: Chunk) -> int | None:
        """What the chunk says itself, else by how much usage has grown with it."""
        if chunk.output_tokens is None:
            return chunk.tokens
        grown = chunk.output_tokens - self._counted
        self._counted = self._outcome.usage_tokens = chunk.output_tokens
        return grown if chunk.tokens is None else chunk.tokens
