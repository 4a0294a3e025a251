"""Full pages of finished KV rows that later requests of the same tenant may start with."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.kv.block_pool import BlockPool
from foreword.kv.states import States


@dataclass(frozen=True, eq=False, slots=True)
class PrefixNode:
    """One published page: the KV rows of `tokens` after everything that `parent` stands for."""

    parent: "PrefixNode | str" = field(repr=False)  # the page before it; a text's first page has the tenant
    tokens: tuple[int, ...]  # a page full of them
    page: int
    # Kinds of extra rows that are in it and in all pages before it -> the last token's hidden states [1, numbers].
    states: dict[str, States] = field(default_factory=dict, repr=False)


class PrefixCache:
    """A trie per tenant whose edges are the exact tokens of a page; the trie holds each of its pages.

    A sequence that uses a node uses all nodes above it too. So whatever hangs below an idle node (held by
    the trie alone) is idle, and since chains are let go of deepest node first, `_idle` lists children
    before their parents: its first entry is the least recently used one and always a leaf.
    """

    def __init__(self, pool: BlockPool, page_size: int) -> None:
        self._pool = pool
        self._page_size = page_size
        self._nodes: dict[tuple[PrefixNode | str, tuple[int, ...]], PrefixNode] = {}
        self._idle: OrderedDict[PrefixNode, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Published pages without a user now."""
        return len(self._idle)

    def is_idle(self, node: PrefixNode) -> bool:
        """Whether the trie alone holds the node's page."""
        return node in self._idle

    def find(self, parent: PrefixNode | str, tokens: tuple[int, ...]) -> PrefixNode | None:
        """The published page with these tokens after `parent`."""
        return self._nodes.get((parent, tokens))

    def match(self, tenant: str, tokens: Sequence[int]) -> list[PrefixNode]:
        """The longest published chain for `tokens` that leaves at least the last one to be computed."""
        chain: list[PrefixNode] = []
        parent: PrefixNode | str = tenant
        for start in range(0, len(tokens) - self._page_size, self._page_size):
            node = self.find(parent, tuple(tokens[start : start + self._page_size]))
            if node is None:
                break
            chain.append(node)
            parent = node
        return chain

    def add(self, parent: PrefixNode | str, tokens: tuple[int, ...], page: int) -> PrefixNode:
        """Publish a page that its only holder keeps in use; that holder uses `parent` too."""
        if (parent, tokens) in self._nodes or self._pool.is_shared(page):
            raise AssertionError("a page is published twice or while another sequence holds it")
        self._pool.share([page])
        node = PrefixNode(parent, tokens, page)
        self._nodes[parent, tokens] = node
        return node

    def hold(self, chain: Sequence[PrefixNode]) -> None:
        """Add a user to each node."""
        for node in chain:
            self._pool.share([node.page])
            self._idle.pop(node, None)

    def let_go(self, chain: Sequence[PrefixNode]) -> None:
        """Take a user from each node of a chain."""
        for node in reversed(chain):
            self._pool.release([node.page])
            if not self._pool.is_shared(node.page):
                self._idle[node] = None

    def evict(self, count: int) -> None:
        """Free the `count` least recently used idle pages."""
        for _ in range(count):
            node, _ = self._idle.popitem(last=False)
            del self._nodes[node.parent, node.tokens]
            self._pool.release([node.page])

    def remove(self, first: PrefixNode) -> set[PrefixNode]:
        """Unpublish a page and all that follow it; those in use stay with their users alone. Returns the nodes."""
        removed = {first}
        for node in list(self._nodes.values()):
            above: PrefixNode | str = node
            while isinstance(above, PrefixNode) and above not in removed:
                above = above.parent
            if isinstance(above, PrefixNode):
                removed.add(node)
        for node in removed:
            del self._nodes[node.parent, node.tokens]
            self._idle.pop(node, None)
            self._pool.release([node.page])
        return removed

    def clear(self) -> None:
        """Unpublish every page; those in use stay with their users alone."""
        self._pool.release(node.page for node in self._nodes.values())
        self._nodes.clear()
        self._idle.clear()

    def published_pages(self) -> list[int]:
        """Every page that the trie holds."""
        return [node.page for node in self._nodes.values()]

    def check_integrity(self) -> None:
        """Raise `AssertionError` if nodes, their chains and the idle list contradict each other."""
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
