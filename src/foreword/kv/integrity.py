"""Whether a sequence's table, lengths and published pages fit together."""

from foreword.kv.prefix_cache import PrefixCache
from foreword.kv.sequence import KvSequence


def check_sequence(sequence: KvSequence, page_size: int, settled: int, prefix: PrefixCache) -> None:
    """Raise `AssertionError` if they contradict each other; rows after the `settled` ones wait for a move."""
    if not 0 <= sequence.computed <= sequence.reserved <= len(sequence.pages) * page_size:
        raise AssertionError(f"lengths out of order: {sequence}")
    parents = [sequence.tenant, *sequence.chain]
    for parent, node, page in zip(parents, sequence.chain, sequence.pages, strict=False):
        if node.parent != parent or node.page != page or prefix.find(parent, node.tokens) is not node:
            raise AssertionError(f"a table and its published chain differ: {sequence}")
    if sequence.published * page_size > settled:
        raise AssertionError(f"rows are published that are not finished: {sequence}")
    if set(prefix.published_pages()) & set(sequence.pages[sequence.published :]):
        raise AssertionError(f"a published page lies outside the chain: {sequence}")
