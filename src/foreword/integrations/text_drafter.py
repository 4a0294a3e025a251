"""Runs drafters in the decoding loops of other engines, which pass token ids and receive a chain of draft tokens."""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NoReturn, cast

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.names import named_methods
from foreword.drafters.registry import DrafterResources, drafter_kinds
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import Checkpoint, open_checkpoint
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import DraftRequest, DraftSource, DraftTask


@dataclass
class _Text:
    """The token ids of a request in progress."""

    request_id: int  # under which the drafter knows it
    tokens: list[int] = field(default_factory=list)
    prompt_len: int = 0


class TextDrafter:
    """Drafts for many texts (lists of token ids), each with a key.

    If the tokens do not begin with those last given for the same key, a new request begins.
    """

    def __init__(
        self,
        speculation: str | Mapping[str, Any],
        vocab_size: int,
        model: str | None = None,
        num_speculative_tokens: int | None = None,
    ) -> None:
        """Create a drafter from names such as `suffix+ngram`, or from a configuration as JSON or mapping.

        `model` is the folder of the tokenizer, which some drafters need. `num_speculative_tokens` applies to
        configurations that do not set it.
        """
        settings = speculation
        if isinstance(settings, str):
            settings = json.loads(settings) if settings.lstrip().startswith("{") else named_methods(settings)
        default = {} if num_speculative_tokens is None else {"num_speculative_tokens": num_speculative_tokens}
        self.config = SpeculationConfig.parse({**default, **settings})
        usable = [  # drafters that need nothing but tokens, and a tokenizer for their text files
            name
            for name, kind in drafter_kinds().items()
            if kind.traits.kind is DraftSource.LOOKUP and not kind.traits.needs and not kind.traits.follows
        ]
        if others := [name for name in self.config.method if name not in usable]:
            raise RequestError(
                f"speculation: {others[0]} runs only in foreword's own engine; give one of {', '.join(usable)}"
            )
        self._drafter = self.config.build(_resources(vocab_size, model))
        if self._drafter.traits.needs:
            raise RequestError(
                "speculation: this method needs the target's hidden states, which other engines do not give; "
                "use another method"
            )
        sampler = RequestSampler(SamplingParams(temperature=0), TokenLimits(vocab_size), (), 0)
        self._sampling = sampler.drafting()
        self._texts: dict[Hashable, _Text] = {}
        self._numbers = count()

    def draft(self, key: Hashable, tokens: Sequence[int], most: int | None = None) -> list[int]:
        """Return at most `most` draft tokens that continue the text; of a tree, its path of first children."""
        text, limit = self._extended(key, tokens), self.config.num_speculative_tokens
        limit = limit if most is None else min(most, limit)
        if limit < 1:
            return []
        depth = limit if self.config.max_depth is None else min(limit, self.config.max_depth)
        (draft,) = self._drafter.propose([DraftTask(self._request(text), limit, depth)])
        return first_path(draft)[:limit]

    def forget(self, key: Hashable) -> None:
        """Drop the text of a key, which is complete; suffix drafters add its answer to their index."""
        if (text := self._texts.pop(key, None)) is not None:
            self._drafter.forget(self._request(text))

    def _extended(self, key: Hashable, tokens: Sequence[int]) -> _Text:
        """Return the text of a key, extended to these tokens; a new one if they do not continue it."""
        text = self._texts.get(key)
        known = 0 if text is None else len(text.tokens)
        if text is None or known > len(tokens) or list(tokens[:known]) != text.tokens:
            self.forget(key)
            text = self._texts[key] = _Text(next(self._numbers), prompt_len=len(tokens))
            known = 0
        text.tokens.extend(int(token) for token in tokens[known:])
        return text

    def _request(self, text: _Text) -> DraftRequest:
        return DraftRequest(text.request_id, text.tokens, self._sampling, text.prompt_len)


def first_path(draft: Draft) -> list[int]:
    """Return the chain of first children. Drafters add the most likely child first."""
    path: list[int] = []
    node = ROOT
    for child, parent in enumerate(draft.parents):
        if parent == node:
            path.append(draft.tokens[child])
            node = child
    return path


def _resources(vocab_size: int, model: str | None) -> DrafterResources:
    """Return resources without a target; the checkpoint in the folder `model` is opened when it is needed."""

    @cache
    def checkpoint() -> Checkpoint:
        if model is None:
            raise RequestError(
                "speculation: datastores and `warm` texts need the target's tokenizer; give its folder as `model`"
            )
        return open_checkpoint(Path(model))

    class LazyCheckpoint:
        """Opens the checkpoint on first access."""

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a checkpoint has
            return getattr(checkpoint(), name)

    def encode(text: str) -> list[int]:
        return checkpoint().tokenizer().encode(text, add_special_tokens=False)

    def refuse(_: Checkpoint) -> NoReturn:
        raise RequestError("speculation: draft models run only in foreword's own engine; use another method")

    absent: Any = None
    load = cast("Callable[[Checkpoint], Any]", refuse)
    return DrafterResources(absent, cast("Checkpoint", LazyCheckpoint()), encode, load, vocab_size)
