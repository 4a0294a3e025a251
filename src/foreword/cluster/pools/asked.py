"""Which draft nodes a target asks, by what the cluster file says."""

from collections.abc import Mapping, Sequence
from typing import Any

from foreword.cluster.address import NodeAddress
from foreword.cluster.pools.fields import names_of, text_of
from foreword.cluster.pools.members import NODES_LIST, Member
from foreword.cluster.pools.scaling import ScaleRule
from foreword.cluster.settings import entries
from foreword.errors import RequestError


class AskedNodes:
    """The nodes of the file: a target asks all of them, or those that it names."""

    def __init__(self, nodes: Sequence[Member], scale: ScaleRule | None, *, is_listed: bool) -> None:
        """`is_listed`: they come and go, so that targets read their addresses from a list."""
        self._nodes = {node.name: node for node in nodes}
        self._scale = scale
        self._is_listed = is_listed

    def by(self, given: Mapping[str, Any], place: str) -> tuple[str, tuple[str, ...]]:
        """A target's `--drafters`, and who is in its list if that is not everybody."""
        if "drafters" not in given:
            return self._all(), ()
        value = given["drafters"]
        if isinstance(value, str) and value.startswith("@"):
            return value, ()
        is_list = isinstance(value, list)
        named = names_of(given, "drafters", place) if is_list else entries(text_of(given, "drafters", place))
        for one in named:
            self._check(one, place)
        if self._is_listed and any(one in self._nodes for one in named):
            return NODES_LIST, tuple(name for one in named for name in self._replicas(one))
        return ",".join(self._address(one) for one in named), ()

    def _all(self) -> str:
        if self._is_listed and self._nodes:
            return NODES_LIST
        return ",".join(node.address for node in self._nodes.values())

    def _address(self, one: str) -> str:
        return self._nodes[one].address if one in self._nodes else one

    def _replicas(self, one: str) -> list[str]:
        """All that there may be of a node of which there are more or fewer."""
        if self._scale is None or one != self._scale.node:
            return [one]
        return [self._nodes[one].replica(number).name for number in range(1, self._scale.most + 1)]

    def _check(self, one: str, place: str) -> None:
        if one in self._nodes:
            return
        try:
            NodeAddress.parse(one)
        except RequestError:
            known = ", ".join(self._nodes) or "none"
            raise RequestError(
                f"cluster file: {place}.drafters has {one!r}, which is neither one of the nodes ({known}) "
                "nor an address (HOST:PORT or unix:/PATH)"
            ) from None
