"""Our drafters in transformers: assisted generation with a candidate generator.

   with foreword_candidates(model, "suffix+ngram"):
       model.generate(**inputs, prompt_lookup_num_tokens=8)

`generate` has no argument for a candidate generator, so any kind of assisted generation uses our drafts within the
block. transformers verifies them, so that the distribution of the text is its own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers.generation.candidate_generator import CandidateGenerator

from foreword.integrations.text_drafter import TextDrafter


class ForewordCandidateGenerator(CandidateGenerator):
    """Drafts chains; `suffix` keeps what it learned between calls of `generate`."""

    def __init__(self, drafter: TextDrafter) -> None:
        self._drafter = drafter
        self.guessed = 0  # draft tokens so far
        self.accepted = 0  # accepted draft tokens

    def get_candidates(self, input_ids: torch.Tensor, **_: object) -> tuple[Any, Any]:
        """Return [1, text + draft] without logits, since the tokens were chosen, not sampled."""
        draft = self._drafter.draft("text", input_ids[0].tolist())
        self.guessed += len(draft)
        if not draft:
            return input_ids, None
        return torch.cat([input_ids, input_ids.new_tensor([draft])], dim=1), None

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        self.accepted += int(num_matches)

    def finish(self) -> None:
        """End an answer."""
        self._drafter.forget("text")


@contextmanager
def foreword_candidates(
    model: Any,  # noqa: ANN401 - any of transformers' models that generate
    speculation: str | Mapping[str, Any] = "suffix+ngram",
    files: str | None = None,
) -> Iterator[ForewordCandidateGenerator]:
    """Use our drafts for assisted generation of this model within the block; `files`: folder with its tokenizer."""
    generator = ForewordCandidateGenerator(TextDrafter(speculation, model.config.vocab_size, files))

    def ours(**_: object) -> ForewordCandidateGenerator:
        generator.finish()
        return generator

    model._get_candidate_generator = ours
    try:
        yield generator
    finally:
        generator.finish()
        del model._get_candidate_generator
