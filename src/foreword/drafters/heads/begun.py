"""Chains that a head has begun behind passes whose verdict is not known yet."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.acceptance.transfer import HostCopy
from foreword.drafters.heads.in_pages import Run
from foreword.kv.sequence import KvSequence
from foreword.speculation.draft import DeviceTokens, Draft
from foreword.speculation.drafting import Ask, Commit, Unjudged


@dataclass
class BegunChain:
    """Guesses behind a text that a pass is about to make longer, and the rows of what it gains."""

    draft: Draft  # what the pass judges
    kv: KvSequence
    first: int  # the first row that was made: the text's length before the pass
    pages: list[int]  # in which these rows lie, as far as the text can grow
    tokens: DeviceTokens  # of the chain that was started
    length: int | None = (
        None  # of the text behind which they are; None: the pass was not judged, or has failed
    )

    @staticmethod
    def of(unjudged: Unjudged, source: HostCopy, places: Sequence[int]) -> "BegunChain":
        pages, first = unjudged.ask.pages, len(unjudged.ask.request.tokens)
        assert pages is not None
        size = pages.cache.page_size
        held = pages.kv.pages[first // size : (first + len(unjudged.draft)) // size + 1]
        return BegunChain(unjudged.draft, pages.kv, first, held, DeviceTokens(source, tuple(places)))

    def learn(self, commit: Commit) -> bool:
        """What the pass has made final; False: this was another pass."""
        is_its = self.length is None and commit.draft is self.draft
        self.length = commit.first + commit.rows + 1  # the newest token has no row yet
        return is_its

    def behind(self, run: Run, ask: Ask) -> Draft | None:
        """The guesses that are asked for, if they are behind this text and the rows of `run` are there with them."""
        kv, wanted = run.pages.kv, min(ask.max_nodes, ask.max_depth)
        if self.kv is not kv or self.first != run.first or self.length != run.end:
            return None
        size = run.pages.cache.page_size
        held = kv.pages[run.first // size : (run.end - 1) // size + 1]
        if wanted > len(self.tokens.places) or held != self.pages[: len(held)]:
            return None
        return Draft.on_device(self.tokens.pick(range(wanted)), run.end, ask.request.epoch)


class BegunChains:
    """Those of all requests."""

    def __init__(self) -> None:
        self._begun: dict[int, BegunChain] = {}  # by request

    def keep(self, request_id: int, chain: BegunChain) -> None:
        self._begun[request_id] = chain

    def tell(self, commits: Sequence[Commit]) -> None:
        """What passes have made final."""
        if self._begun:
            for commit in commits:
                known = self._begun.get(commit.request.request_id)
                if known is not None and not known.learn(commit):
                    self.forget(commit.request.request_id)

    def take(self, run: Run, ask: Ask) -> Draft | None:
        """What was begun for this text; whatever it is, it is asked for once."""
        known = self._begun.pop(ask.request.request_id, None)
        return None if known is None else known.behind(run, ask)

    def forget(self, request_id: int) -> None:
        self._begun.pop(request_id, None)


def joined(drafts: Sequence[Draft]) -> list[Draft]:
    """Drafts of several sources as drafts of one: a pass takes no more."""
    pending = [draft.device.source for draft in drafts if draft.device is not None]
    sources = list({id(source): source for source in pending}.values())
    if len(sources) < 2:
        return list(drafts)
    whole, first, firsts = HostCopy.joined(sources), 0, {}
    for source in sources:
        firsts[id(source)] = first
        first += source.on_device.numel()
    return [
        draft if draft.device is None else _moved(draft, draft.device, whole, firsts[id(draft.device.source)])
        for draft in drafts
    ]


def _moved(draft: Draft, tokens: DeviceTokens, source: HostCopy, first: int) -> Draft:
    """Return the same chain with its tokens in another source, `first` numbers further on."""
    places = tuple([first + place for place in tokens.places])
    return Draft.on_device(DeviceTokens(source, places), draft.committed_len, draft.epoch)
