"""Runs Foreword's drafters inside vLLM: a class for `speculative_config` with method `custom_class`.

    LLM(model, speculative_config={
        "method": "custom_class",
        "model": "foreword.integrations.vllm.ForewordProposer",
        "num_speculative_tokens": 5,
    })

vLLM's config has no field for a drafter's settings. They are read from the environment variable FOREWORD_SPECULATION,
in the format of `--speculation`, or from a subclass. vLLM itself is not imported.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from foreword.integrations.text_drafter import TextDrafter

VARIABLE = "FOREWORD_SPECULATION"  # the environment variable


class ForewordProposer:
    """A vLLM proposer with Foreword's drafters that need only tokens; a subclass may set `speculation`."""

    speculation: ClassVar[Mapping[str, Any] | str | None] = None

    def __init__(self, vllm_config: Any) -> None:  # noqa: ANN401 - vLLM's own type
        settings = self.speculation or os.environ.get(VARIABLE) or "suffix+ngram"
        max_tokens = vllm_config.speculative_config.num_speculative_tokens
        model = vllm_config.model_config
        self._context = model.max_model_len
        files = model.model if os.path.isdir(model.model) else None  # noqa: PTH112 - a hub id is not a path
        self._drafter = TextDrafter(settings, model.get_vocab_size(), files, max_tokens)
        self._rows: set[int] = set()  # row numbers of the last batch

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,  # noqa: ANN401 - array [rows]: number of tokens of each request
        token_ids_cpu: Any,  # noqa: ANN401 - array [rows, context]: tokens of prompt and answer
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Return a draft for every row of the batch, empty for rows without new tokens. The names are vLLM's.

        A row may belong to another request than in the last call.
        """
        rows = range(len(sampled_token_ids))
        for finished in self._rows - set(rows):
            self._drafter.forget(finished)
        self._rows = set(rows)
        return [self._draft(row, sampled_token_ids[row], num_tokens_no_spec, token_ids_cpu) for row in rows]

    def _draft(self, row: int, sampled: Sequence[int], lengths: Any, tokens: Any) -> list[int]:  # noqa: ANN401
        length = int(lengths[row])
        if not len(sampled) or length >= self._context:  # prefill is incomplete, or the context is full
            return []
        return self._drafter.draft(row, tokens[row, :length].tolist(), self._context - length - 1)

    def load_model(self, *args: object, **kwargs: object) -> None:
        """Do nothing: there is no model."""
