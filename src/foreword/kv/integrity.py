"""What must hold of all sequences of a cache together."""

from foreword.kv.block_pool import BlockPool
from foreword.kv.prefix_cache import PrefixCache
from foreword.kv.row_moves import RowMoves
from foreword.kv.sequence import KvSequence


def check_sequences(
    sequences: set[KvSequence], pool: BlockPool, prefix: PrefixCache, moves: RowMoves, page_size: int
) -> None:
    """Raise `AssertionError` if pages, tables, lengths, moves or published pages contradict each other."""
    published = prefix.published_pages()
    pool.check_integrity([*(sequence.pages for sequence in sequences), published])
    prefix.check_integrity()
    moves.check_integrity(sequences)
    for sequence in sequences:
        room = len(sequence.pages) * page_size
        if not 0 <= sequence.computed <= sequence.begin <= sequence.reserved <= room:
            raise AssertionError(f"lengths out of order: {sequence}")
        if sequence.published * page_size > moves.settled(sequence):
            raise AssertionError(f"rows are published that are not finished: {sequence}")
        _check_chain(sequence, prefix, set(published))


def _check_chain(sequence: KvSequence, prefix: PrefixCache, published: set[int]) -> None:
    """The published pages of a sequence are its first ones, finished, and one chain of its tenant."""
    parents = [sequence.tenant, *sequence.chain]
    for parent, node, page in zip(parents, sequence.chain, sequence.pages, strict=False):
        if node.parent != parent or node.page != page or prefix.find(parent, node.tokens) is not node:
            raise AssertionError(f"a table and its published chain differ: {sequence}")
    if published & set(sequence.pages[sequence.published :]):
        raise AssertionError(f"a published page lies outside the chain: {sequence}")
