"""Foreword itself."""

from collections.abc import Iterator, Sequence
from itertools import count

from foreword.acceptance.params import SamplingParams
from foreword.drafters.names import named_methods
from foreword.engine.llm import LLM
from foreword.engine.messages import NewRequest


class Ours:
    """`plain`, `auto` or the name of a method; `draft_model` with its path."""

    def __init__(self, model: str, mode: str, threads: int, draft: str | None = None) -> None:
        named = {"method": mode, "model": draft} if draft else named_methods(mode)
        speculation = {"plain": "off", "auto": "auto"}.get(mode) or {**named, "fixed": True}
        self._llm = LLM(model, speculation=speculation)
        self._numbers = count()

    def tokens(self, prompt: Sequence[int], count: int) -> Iterator[Sequence[int]]:
        """By steps of the engine, for a tenant of its own: nothing is in the prefix cache."""
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        engine, tenant = self._llm.engine, f"answer {next(self._numbers)}"
        (request,) = engine.add(NewRequest("compare", tuple(prompt), params, tenant))
        done = len(request.tokens)
        while request.finish_reason is None:
            engine.step()
            if len(request.tokens) > done:
                yield request.tokens[done:]
                done = len(request.tokens)
