"""P-EAGLE: an EAGLE-3 head that guesses many tokens in one pass, with masks where it would read its own guesses."""

from foreword.backends.interface import HeadCall, HeadOutput
from foreword.drafters.heads.at_once import guess_at_once
from foreword.drafters.heads.chain_plan import drafted, plan_chains
from foreword.drafters.heads.in_pages import Run, fill
from foreword.drafters.heads.loading import HEAD, HeadConfig, LoadedHead, load_head
from foreword.drafters.heads.stepwise import StepwiseHead
from foreword.drafters.registry import DrafterKind, Guesses, is_wide
from foreword.drafters.resources import DrafterResources
from foreword.models.heads.layouts.eagle import MASK_HIDDEN
from foreword.speculation.draft import Draft, marked_cold
from foreword.speculation.drafting import Ask


class PEagleHead(StepwiseHead):
    """Its rows are EAGLE-3's; behind the newest token's come rows of masks, and all of them guess."""

    traits = HEAD

    def __init__(self, head: LoadedHead, width: int) -> None:
        super().__init__(head, width)
        assert head.spec.mask_token_id is not None
        self._mask, self._mask_features = head.spec.mask_token_id, head.own[MASK_HIDDEN].view(1, -1)

    def _guess(self, asks: list[Ask], runs: list[Run]) -> list[Draft]:
        tails = [
            Draft.chain(
                [self._mask] * min(ask.max_nodes - 1, ask.max_depth - 1, run.pages.kv.reserved - run.end),
                run.end,
            )
            for ask, run in zip(asks, runs, strict=True)
        ]
        rows = self._true_rows(runs, 1, tails, self._mask_features)
        places = [1 + len(tail) for tail in tails]
        plan = plan_chains(asks, places, self._vocabulary) if self._width == 1 else None
        output = self._runner.draft(HeadCall(rows, runs[0].pages.store, plan))
        fill(runs)
        if not isinstance(output, HeadOutput):
            return drafted(asks, output)
        drafts = guess_at_once(asks, places, output.logits, self._vocabulary, self._width)
        return list(marked_cold(drafts, output.is_cold))


def build_p_eagle(config: HeadConfig, resources: DrafterResources) -> PEagleHead:
    """Load the head beside the target."""
    return PEagleHead(load_head(config.model, "p_eagle", resources), config.tree_width)


KIND = DrafterKind(
    "an EAGLE-3 head that guesses many tokens in one pass",
    HeadConfig,
    build_p_eagle,
    is_wide,
    can_hang=False,
    guesses=Guesses.DRAWN,
    traits=HEAD,
)
