"""Retrieval (REST, He et al. 2023, arXiv 2311.08252): drafts continuations found in a datastore."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreword.drafters.datastore.format import DEPTH, DatastoreError, fingerprint
from foreword.drafters.datastore.search import Datastore, Ints
from foreword.drafters.lookup.base import LookupDrafter
from foreword.drafters.registry import DrafterResources, chosen_kind
from foreword.errors import RequestError
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import DraftTask
from foreword.speculation.settings import REQUIRED, DrafterSettings, Limit, at_least, setting

_TOKEN_BITS = 32  # a key is (number of a prefix << 32) + the token that follows the prefix
_DROPPED = -2  # in place of the number of a prefix that is too rare; -1 (ROOT) is the empty prefix


@dataclass(frozen=True)
class RestConfig(DrafterSettings):
    """Location of the datastore, and matching limits."""

    datastore: str = setting(REQUIRED, "a file written by `foreword datastore build`")
    min_match: int = setting(2, "minimum match length")
    max_match: int = setting(DEPTH, "maximum match length")
    max_matches: int = setting(1000, "counted continuations; if there are more, a sample", at_least(1))
    min_probability: float = setting(
        0.05, "minimum fraction of the matches for a node", Limit("in 0 .. 1", lambda value: 0 <= value <= 1)
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_match <= self.max_match <= DEPTH:
            raise RequestError(
                f"speculation: min_match and max_match must satisfy 1 <= min <= max <= {DEPTH}, "
                f"not {self.min_match} and {self.max_match}"
            )


def build_rest(config: RestConfig, resources: DrafterResources) -> "RestDrafter":
    """Open the datastore and check that its tokenizer is the model's."""
    store = Datastore(Path(config.datastore))
    if store.header.tokenizer != fingerprint(resources.checkpoint.tokenizer()):
        raise DatastoreError(
            f"datastore {config.datastore} was made with another tokenizer, that of {store.header.model}; "
            "build it again with --model"
        )
    return RestDrafter(config, store)


class RestDrafter(LookupDrafter[None]):
    """Drafts trees of the most frequent continuations; keeps no state per request."""

    def __init__(self, config: RestConfig, store: Datastore) -> None:
        super().__init__()
        self._config = config
        self._store = store

    def close(self) -> None:
        self._store.close()

    def memory_bytes(self) -> int:
        """Return 0: the datastore is memory-mapped."""
        return 0

    def draft(self, task: DraftTask) -> Draft:
        request, config = task.request, self._config
        text_end = np.array(request.tokens[-config.max_match :], np.int64)
        matches = self._store.longest_matches(text_end, config.min_match, config.max_matches)
        if not matches.length:
            return Draft()
        continuations = self._store.continuations(matches.starts, min(task.max_nodes, task.max_depth))
        tokens, parents = most_frequent(continuations, task.max_nodes, config.min_probability)
        return Draft(tokens, parents, len(request.tokens), request.epoch)


def most_frequent(
    continuations: Ints, max_nodes: int, min_share: float
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return tokens and parents of the tree of the most frequent prefixes.

    `continuations` has token ids [matches, depth]; -1: the continuation has ended. A prefix is at least as frequent as
    its extensions, so that the most frequent prefixes form a tree. Every iteration extends the prefixes by one token.
    """
    min_count = max(1.0, min_share * len(continuations))
    prefixes: list[tuple[int, int, int, int]] = []  # (-count, number, token, parent's number)
    prefix_of = np.full(
        len(continuations), ROOT
    )  # number of each continuation's prefix in the current iteration
    for level in range(continuations.shape[1]):
        continues = continuations[:, level] >= 0
        continuations, prefix_of = continuations[continues], prefix_of[continues]
        # Shifting also works for ROOT, which is -1: `divmod` below is the inverse.
        keys, key_of, counts = np.unique(
            (prefix_of << _TOKEN_BITS) + continuations[:, level], return_inverse=True, return_counts=True
        )
        best = np.argsort(-counts, kind="stable")[:max_nodes]
        best = best[counts[best] >= min_count]
        numbers = np.full(len(counts), _DROPPED)
        numbers[best] = len(prefixes) + np.arange(len(best))
        for index in best.tolist():
            parent, token = divmod(int(keys[index]), 1 << _TOKEN_BITS)
            prefixes.append((-int(counts[index]), len(prefixes), token, parent))
        prefix_of = numbers[key_of]
        is_kept = prefix_of != _DROPPED
        continuations, prefix_of = continuations[is_kept], prefix_of[is_kept]
    # Parents sort before their extensions: they are at least as frequent, and their numbers are smaller.
    nodes = sorted(prefixes)[:max_nodes]
    node_of = {ROOT: ROOT} | {number: node for node, (_, number, _, _) in enumerate(nodes)}
    return tuple(token for _, _, token, _ in nodes), tuple(node_of[parent] for *_, parent in nodes)


KIND = chosen_kind(
    RestDrafter,
    "drafts continuations found in a datastore of texts",
    RestConfig,
    build_rest,
    makes_trees=lambda _: True,
)
