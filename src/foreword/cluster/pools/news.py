"""What whoever watches members in other places hears of them."""

import logging
from collections.abc import Sequence

from foreword.cluster.pools.fleet import MemberTold

_log = logging.getLogger(__name__)


class News:
    """Tells each thing once: who is there, who was started again, who cannot be."""

    def __init__(self) -> None:
        self._known: dict[str, MemberTold] = {}

    def tell(self, members: Sequence[MemberTold]) -> None:
        for one in members:
            before = self._known.get(one.name)
            self._known[one.name] = one
            if before is None or before.machine != one.machine:
                _log.info("%s is started on %s", one.name, one.machine)
            elif one.restarts > before.restarts:
                _log.warning("%s has ended and is started again (%d times so far)", one.name, one.restarts)
            if one.is_refused and (before is None or not before.is_refused):
                _log.error(
                    "%s cannot use what it was given and is not started again; its log says why", one.name
                )
