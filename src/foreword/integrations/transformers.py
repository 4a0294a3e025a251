"""Runs Foreword's drafters in transformers, as the candidate generator of assisted generation.

   with foreword_candidates(model, "suffix+ngram"):
       model.generate(**inputs, prompt_lookup_num_tokens=8)

`generate` has no argument for a candidate generator, so within the block every kind of assisted generation uses this
one. transformers verifies the drafts: the distribution of the text does not change.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from foreword.integrations.text_drafter import TextDrafter


class ForewordCandidateGenerator(CandidateGenerator):
    """Candidate generator of transformers with a Foreword drafter; `suffix` also drafts from earlier answers."""

    def __init__(self, drafter: TextDrafter) -> None:
        self._drafter = drafter
        self._max_length = 0  # maximum number of tokens of the text
        self._end_ids: tuple[int, ...] = ()
        self.guessed = 0  # draft tokens of all calls
        self.accepted = 0  # accepted draft tokens of all calls

    def begin(self, config: Any) -> None:  # noqa: ANN401 - transformers' own type
        """End the text in progress, and begin one with this generation config."""
        self.finish()
        ends = config.eos_token_id
        self._max_length = config.max_length
        self._end_ids = () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)

    def get_candidates(self, input_ids: torch.Tensor, **_: object) -> tuple[Any, Any]:
        """Return the token ids [1, text + draft], and None for the logits: the draft tokens were not sampled.

        transformers before version 5 accepts draft tokens beyond the maximum length and after an end token.
        """
        text = input_ids[0].tolist()
        room = self._max_length - len(text) - 1  # the model adds a token to every draft
        drafted = self._drafter.draft("text", text, room)
        draft = list(takewhile(lambda token: token not in self._end_ids, drafted))
        self.guessed += len(draft)
        if not draft:
            return input_ids, None
        return torch.cat([input_ids, input_ids.new_tensor([draft])], dim=1), None

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Count the accepted draft tokens of a verified draft."""
        self.accepted += int(num_matches)

    def finish(self) -> None:
        """End the text in progress."""
        self._drafter.forget("text")


@contextmanager
def foreword_candidates(
    model: Any,  # noqa: ANN401 - any model of transformers that has `generate`
    speculation: str | Mapping[str, Any] = "suffix+ngram",
    files: str | None = None,
) -> Iterator[ForewordCandidateGenerator]:
    """Return a context in which assisted generation of this model uses the drafter.

    `files` is the tokenizer's folder.
    """
    generator = ForewordCandidateGenerator(TextDrafter(speculation, model.config.vocab_size, files))

    def candidate_generator(generation_config: object, **_: object) -> ForewordCandidateGenerator:
        generator.begin(generation_config)
        return generator

    model._get_candidate_generator = candidate_generator
    try:
        yield generator
    finally:
        generator.finish()
        del model._get_candidate_generator
