"""Defects of guesses that a device still makes while their pass is laid out."""

from catalogue import Mutant

PENDING = "tests/unit/speculation/test_pending_drafts.py"
BEGUN = "tests/unit/drafters/test_begun_chains.py"
AHEAD = "tests/integration/test_anticipated_guesses.py"
SAME_GUESSES = f"{AHEAD}::test_they_are_the_guesses_of_a_text_that_is_known"
SAME_TEXT = f"{PENDING}::test_they_are_read_after_their_pass_and_the_text_is_the_plain_one"

PENDING_MUTANTS = (
    Mutant(
        48,
        "guesses stay unread where what is drawn depends on them",
        "speculation/proposing.py",
        "call_drafters",
        "pending in (None, source) and entries[index].request.sampler.can_pipeline",
        "pending in (None, source)",
        (SAME_TEXT,),
    ),
    Mutant(
        48,
        "a pass reads the guesses of two devices from one",
        "speculation/proposing.py",
        "call_drafters",
        "pending in (None, source) and entries[index].request.sampler.can_pipeline",
        "entries[index].request.sampler.can_pipeline",
        (f"{PENDING}::test_a_pass_takes_the_guesses_of_one_source",),
    ),
    Mutant(
        48,
        "a guess that could not be drawn is none, though its pass has read one",
        "speculation/draft.py",
        "DeviceTokens.read",
        "min(tokens, default=0) < 0",
        "False",
        (f"{PENDING}::test_where_nothing_could_be_drawn_it_says_what_the_pass_has_read",),
    ),
    Mutant(
        48,
        "guesses are judged by where they stand instead of by what they are",
        "speculation/accept.py",
        "Acceptance.verdicts",
        "self.drafts[index].tokens",
        "self.drafts[index].pass_ids",
        (SAME_TEXT,),
    ),
    Mutant(
        48,
        "the time that a device drafts is nobody's",
        "speculation/proposing.py",
        "Proposal.with_device_times",
        "max(call.seconds, seconds)",
        "call.seconds",
        (f"{PENDING}::test_a_call_took_as_long_as_the_device_did",),
    ),
    Mutant(
        48,
        "guesses begun behind a pass that failed are taken for those of the next",
        "drafters/heads/chains.py",
        "EarlyChain.record_verdict",
        "self.length is None and commit.draft is self.draft",
        "self.length is None",
        (f"{BEGUN}::test_what_does_not_follow_the_text_is_dropped", SAME_GUESSES),
    ),
    Mutant(
        48,
        "rows in a page that is another by now count as made",
        "drafters/heads/chains.py",
        "EarlyChain.draft_after",
        "wanted > len(self.tokens.indices) or row_pages != self.pages[:len(row_pages)]",
        "wanted > len(self.tokens.indices)",
        (f"{BEGUN}::test_what_does_not_follow_the_text_is_dropped",),
    ),
    Mutant(
        48,
        "a chain is begun with the states of the position behind",
        "drafters/heads/eagle.py",
        "StepwiseHead._rows_in_flight",
        "(entry.states_at, entry.states_at + rows)",
        "(entry.states_at + 1, entry.states_at + 1 + rows)",
        (f"{AHEAD}::test_rows_in_the_pages_are_those_of_the_text",),
    ),
    Mutant(
        48,
        "a chain is drawn with the noise of the position before",
        "drafters/heads/chains.py",
        "plan_after_pass",
        "plan.lengths + 1",
        "plan.lengths",
        (SAME_GUESSES,),
    ),
    Mutant(
        48,
        "rows that were made ahead are not counted",
        "drafters/heads/eagle.py",
        "StepwiseHead._draft",
        "mark_computed([row_range for row_range, draft in zip(ranges, early, strict=True) if draft is not None])",
        "",
        (f"{AHEAD}::test_rows_in_the_pages_are_those_of_the_text",),
    ),
    Mutant(
        48,
        "a run goes on behind a guess that was not drawn",
        "backends/cuda/kernels/chains.py",
        "_count_accepted",
        "is_accepted = is_accepted & (tl.maximum(token, 0) == target_token)\ncount += is_accepted.to(tl.int32)",
        "count += (is_accepted & (tl.maximum(token, 0) == target_token)).to(tl.int32)",
        (
            "tests/unit/backends/cuda/test_chain_places.py::test_a_run_ends_with_the_first_guess_that_is_not_drawn",
        ),
    ),
    Mutant(
        48,
        "what a device compiles first counts as what a draft costs",
        "speculation/measured/costs.py",
        "StepCosts.observe",
        "if not call.is_cold:\n    self._observe_call(call)",
        "self._observe_call(call)",
        ("tests/unit/speculation/test_cold_runs.py::test_they_teach_nothing_of_costs",),
    ),
)
