"""llama.cpp as a yardstick for the cost of a step."""

from pathlib import Path
from time import perf_counter

from foreword.bench.costs.llama_cpp import LlamaCppError, load_llama_cpp
from foreword.bench.costs.step_cost import random_tokens


class LlamaCppTimer:
    """Times passes of llama.cpp over the same tokens as ours."""

    def __init__(self, path: Path, context: int, most_tokens: int, threads: int) -> None:
        self._library = library = load_llama_cpp()
        self._model = library.llama_model_load_from_file(
            str(path).encode(), library.llama_model_default_params()
        )
        if not self._model:
            raise LlamaCppError(f"llama.cpp cannot load {path}; delete it and try again")
        settings = library.llama_context_default_params()
        settings.n_ctx = context + most_tokens + 64
        settings.n_batch = settings.n_ubatch = max(context, most_tokens, 512)
        settings.n_threads = settings.n_threads_batch = threads
        self._context = library.llama_init_from_model(self._model, settings)
        self._batch = library.llama_batch_init(settings.n_batch, 0, 1)
        vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self._model))
        self._tokens = random_tokens(max(context, most_tokens), vocab)
        self._length = context - 1  # the newest committed token is part of every step
        if self._length:
            self._decode(self._tokens[: self._length], 0, all_logits=False)

    def step(self, n: int) -> float:
        """Seconds of a pass over n new tokens after the context, with the logits of all."""
        newest = self._tokens[self._length : self._length + 1]
        return self._timed(newest + self._tokens[: n - 1], self._length, all_logits=True)

    def prefill(self, count: int) -> float:
        """Seconds of computing a prompt of `count` tokens from nothing, with the last one's logits."""
        self._cut(0)
        seconds = self._timed(self._tokens[:count], 0, all_logits=False)
        self._decode(self._tokens[: self._length], 0, all_logits=False)
        return seconds

    def _timed(self, tokens: list[int], start: int, all_logits: bool) -> float:
        began = perf_counter()
        self._decode(tokens, start, all_logits)
        seconds = perf_counter() - began
        self._cut(start)
        return seconds

    def _cut(self, length: int) -> None:
        self._library.llama_memory_seq_rm(self._library.llama_get_memory(self._context), 0, length, -1)

    def _decode(self, tokens: list[int], start: int, all_logits: bool) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, start + i, 1, 0
            batch.logits[i] = all_logits or i == len(tokens) - 1
        if self._library.llama_decode(self._context, batch):
            raise LlamaCppError("llama.cpp refused a pass; try a shorter --context")
