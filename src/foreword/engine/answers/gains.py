"""What an answer has gained since that was last asked."""

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.engine.messages import DraftShown
from foreword.speculation.verdict import Verdict


class Gains:
    """The verdicts of some passes, nearly always of one, taken together."""

    __slots__ = ("drafted", "drafts", "from_draft", "logprobs", "text", "token_ids")

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.drafted = 0  # guesses that were judged
        self.from_draft = 0  # guesses that were committed
        self.drafts: tuple[DraftShown, ...] = ()  # of every pass that brought tokens, if they are shown

    def add(self, verdict: Verdict, text: str, shows: bool) -> None:
        self.text += text
        self.token_ids += verdict.tokens
        self.logprobs += verdict.logprobs
        if verdict.draft.parents:
            self.drafted += len(verdict.judged.parents)
            self.from_draft += len(verdict.path)
        if shows and verdict.tokens:
            draft = verdict.draft
            self.drafts += (DraftShown(draft.tokens, draft.parents, verdict.path, len(verdict.tokens)),)
