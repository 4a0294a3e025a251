"""What is kept of a request while it is there: who could draft for it, and who was asked, told, or tried."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from foreword.control.decisions.arms import Arm
from foreword.control.learning.hindsight import Waiting
from foreword.speculation.draft import Draft
from foreword.speculation.requests import Aside, DraftPlan, StepRequest

MOST_WAITING = 4
"""Drafts of one request that wait for their text; the oldest is given up for another."""


@dataclass(eq=False)
class RequestRecord:
    """What the policy keeps of a request while it is there."""

    method: str  # of all that could be asked when it was made
    arms: list[Arm]
    is_coupled: bool  # whether a guess is accepted if and only if it is the token that comes
    request: Callable[[], StepRequest | None]  # None: it is gone
    is_watched: bool = False  # whether heads are told of it though they are not in use
    is_told: bool = False  # whether heads are told of the pass under way
    was_told: bool = False  # and of the one before
    is_whole: bool = True  # whether heads were told of all passes
    length: int = 0  # tokens of its text
    reader: Arm | None = None  # who reads along in the pass under way, without being asked
    waiting: list[Waiting] = field(default_factory=list)
    asked: Arm | None = None  # in the pass under way
    asked_depth: int = 0
    is_probe: bool = False  # whether the draft is only to be compared with the text
    offered_depth: int = 0  # of what came
    kept_depth: int = 0  # levels of it that were worth verifying
    trial_depth: int = 0  # levels that are verified whatever they seem to be worth; 0: by their worth

    def ask(
        self, arm: Arm | None, depth: int = 0, is_probe: bool = False, stops: bool = True
    ) -> DraftPlan | None:
        """A new pass, in which this drafter is asked; None: nobody.

        Its draft ends where going on is not worth it, if it can and `stops`.
        """
        self.asked, self.asked_depth, self.is_probe = arm, depth, is_probe
        self.offered_depth = self.kept_depth = self.trial_depth = 0
        if arm is None:
            return None
        return arm.planned(depth, arm.behind(self.length), arm.stop(stops))

    @cached_property
    def heads(self) -> list[Arm]:
        """Those that need the states of the whole prompt to guess."""
        return [arm for arm in self.arms if arm.reading is not None]

    def may_ask(self, arm: Arm) -> bool:
        """Whether a drafter's guesses are what it is known for.

        A head that has not read all of a text guesses worse: where others can be asked instead, it is left alone, or
        its cohort's estimate would say more of when it was asked than of the head.
        """
        return self.is_whole or arm.reading is None or len(self.arms) == 1

    @property
    def has_head_in_use(self) -> bool:
        """Or one that pays and may come into use soon: it would be lost for the text if it were not told of it."""
        for head in self.heads:
            control = head.control
            if control.is_on and self.may_ask(head) and not (control.is_left and self._is_settled):
                return True
        return False

    @property
    def _is_settled(self) -> bool:
        """Whether those in use are what they are believed to be: what is new was preferred for its promise alone."""
        return not any(arm.control.in_use and arm.control.estimate.is_new for arm in self.arms)

    @property
    def is_steady(self) -> bool:
        """Whether heads are told of it as they were in the pass before."""
        return self.is_told is self.was_told

    def read(self) -> DraftPlan | None:
        """A pass of the prompt, in which a head that may guess behind it reads along; None: there is none."""
        self.ask(None)
        may = [arm for arm in self.heads if self.is_watched or arm.control.may_guess]
        return self.tell(max(may, key=lambda arm: arm.control.worth.gain, default=None))

    def tell(self, head: Arm | None) -> DraftPlan | None:
        """A pass in which this head is not asked and makes rows of what it hears; None: none."""
        self.reader, self.is_told = head, head is not None
        return None if head is None else head.reading

    def heard(self, tokens: list[int]) -> None:
        """The pass is over: who was asked, or read along, knows the text."""
        if self.asked is not None:
            self.asked.heard = len(tokens)
        if self.reader is not None:
            self.reader.heard = len(tokens)
        self.asked = self.reader = None

    def ask_aside(self, arm: Arm, depth: int) -> Aside:
        """Ask another drafter beside the one whose guesses are verified, to compare its own with the text."""
        fit = arm.fit

        def keep(draft: Draft) -> None:
            kept = arm.worth_verifying(draft)
            fit.pair.answered(depth, draft.depth, kept)
            if len(draft):
                self.waiting.append(Waiting(fit, draft, depth, kept))

        plan = arm.planned(depth, arm.behind(self.length), None)
        arm.heard = self.length
        return Aside(plan, keep)

    def keep_aside(self, draft: Draft) -> None:
        """A draft that is compared with the text when it has come."""
        assert self.asked is not None
        self.waiting.append(Waiting(self.asked.fit, draft, self.asked_depth, self.kept_depth))
        if len(self.waiting) > MOST_WAITING:
            del self.waiting[0]

    def waits_for(self, arm: Arm) -> bool:
        """Whether the text has not come yet that its last draft is compared with.

        If its guesses were verified it would be asked again behind them, not within: asked more often where it is
        right, it would look as if it had something to say more often.
        """
        return any(waiting.fit is arm.fit for waiting in self.waiting)

    def follow(self, tokens: list[int]) -> None:
        """The text has grown."""
        if len(self.waiting) == 1:  # nearly always
            if self.waiting[0].follow(tokens):
                self.waiting.clear()
        else:
            self.waiting = [waiting for waiting in self.waiting if not waiting.follow(tokens)]
