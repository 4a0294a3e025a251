"""Prefix cache: full pages of committed KV rows, shared within a tenant."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from foreword.kv.block_pool import BlockPool
from foreword.kv.states import States


@dataclass(frozen=True, eq=False, slots=True)
class PrefixNode:
    """One published page: the KV rows of `tokens` after the text of `parent`."""

    parent: "PrefixNode | str" = field(repr=False)  # the previous page; the tenant for a text's first page
    tokens: tuple[int, ...]  # as many as a page has rows
    page: int
    # By drafter: hidden states [1, numbers] of the page's last token. Has a drafter only if its rows in this page and
    # in all earlier pages are filled.
    states: dict[str, States] = field(default_factory=dict, repr=False)


class PrefixCache:
    """A trie per tenant, whose edges are pages of tokens. It holds its pages in the block pool.

    A node is idle if no sequence uses it. A sequence uses a node with all its ancestors, so all descendants of an idle
    node are idle. Sequences release the deepest node first, so `_idle` lists children before parents. Its first entry
    is therefore a leaf, and the least recently used node.
    """

    def __init__(
        self, pool: BlockPool, page_size: int, on_unpublish: Callable[[PrefixNode], None] | None = None
    ) -> None:
        """`on_unpublish` is called with every node that is no longer published."""
        self._on_unpublish = on_unpublish
        self._pool = pool
        self._page_size = page_size
        self._nodes: dict[tuple[PrefixNode | str, tuple[int, ...]], PrefixNode] = {}
        self._idle: OrderedDict[PrefixNode, None] = OrderedDict()  # used as an ordered set
        # Records of drafters' rows that were overwritten. Any thread may add one; states are dropped on the next match.
        self.void_rows: set[str] = set()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def is_idle(self, node: PrefixNode) -> bool:
        return node in self._idle

    def find(self, parent: PrefixNode | str, tokens: tuple[int, ...]) -> PrefixNode | None:
        """Return the published page with these tokens after the text of `parent`, or None."""
        return self._nodes.get((parent, tokens))

    def match(self, tenant: str, tokens: Sequence[int]) -> list[PrefixNode]:
        """Return the longest published chain for `tokens` that leaves at least the last token to compute."""
        chain: list[PrefixNode] = []
        parent: PrefixNode | str = tenant
        for start in range(0, len(tokens) - self._page_size, self._page_size):
            node = self.find(parent, tuple(tokens[start : start + self._page_size]))
            if node is None:
                break
            for record in self.void_rows.intersection(node.states):
                del node.states[record]
            chain.append(node)
            parent = node
        return chain

    def add(self, parent: PrefixNode | str, tokens: tuple[int, ...], page: int) -> PrefixNode:
        """Publish a page. Exactly one sequence must hold it, and go on using it and `parent`."""
        if (parent, tokens) in self._nodes or self._pool.is_shared(page):
            raise AssertionError("a page is published twice or while another sequence holds it")
        self._pool.share([page])
        node = PrefixNode(parent, tokens, page)
        self._nodes[parent, tokens] = node
        return node

    def hold(self, chain: Sequence[PrefixNode]) -> None:
        """Add a user to each node of a chain."""
        for node in chain:
            self._pool.share([node.page])
            self._idle.pop(node, None)

    def release(self, chain: Sequence[PrefixNode]) -> None:
        """Remove a user from each node of a chain, the deepest first."""
        for node in reversed(chain):
            self._pool.release([node.page])
            if not self._pool.is_shared(node.page):
                self._idle[node] = None

    def evict(self, count: int) -> None:
        """Unpublish the `count` least recently used idle pages."""
        for _ in range(count):
            node, _ = self._idle.popitem(last=False)
            self._unpublish(node)

    def remove(self, first: PrefixNode) -> set[PrefixNode]:
        """Unpublish a page and its descendants; return their nodes. Sequences keep the pages they use."""
        removed = {first}
        for node in list(self._nodes.values()):
            ancestor: PrefixNode | str = node
            while isinstance(ancestor, PrefixNode) and ancestor not in removed:
                ancestor = ancestor.parent
            if isinstance(ancestor, PrefixNode):  # the walk ended at a removed node, not at the tenant
                removed.add(node)
        for node in removed:
            self._idle.pop(node, None)
            self._unpublish(node)
        return removed

    def clear(self) -> None:
        """Unpublish every page. Sequences keep the pages they use."""
        for node in list(self._nodes.values()):
            self._unpublish(node)
        self._idle.clear()

    def _unpublish(self, node: PrefixNode) -> None:
        del self._nodes[node.parent, node.tokens]
        self._pool.release([node.page])
        if self._on_unpublish is not None:
            self._on_unpublish(node)

    def published_pages(self) -> list[int]:
        return [node.page for node in self._nodes.values()]

    def check_integrity(self) -> None:
        """Raise `AssertionError` if nodes, chains and the idle list are inconsistent."""
        nodes = set(self._nodes.values())
        if len(set(self.published_pages())) != len(nodes):
            raise AssertionError("a page is published twice")
        if {node for node in nodes if not self._pool.is_shared(node.page)} != set(self._idle):
            raise AssertionError("the idle list is not the set of published pages without users")
        evicted: set[PrefixNode | str] = set()
        for node in self._idle:
            if node.parent in evicted:
                raise AssertionError(f"a parent would be evicted before its child: {node}")
            evicted.add(node)
        for (parent, tokens), node in self._nodes.items():
            if (parent, tokens) != (node.parent, node.tokens) or len(tokens) != self._page_size:
                raise AssertionError(f"a node is kept under a wrong key: {node}")
            if isinstance(parent, PrefixNode) and (
                parent not in nodes or (parent in self._idle and node not in self._idle)
            ):
                raise AssertionError(f"a node's parent is gone or counts as idle: {node}")
