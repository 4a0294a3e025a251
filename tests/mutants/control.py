"""Defects of the controller: wrong books, wrong arithmetic, and references that are none."""

from catalogue import UNIT, Mutant

CONTROL = f"{UNIT}/control"
DECISIONS = f"{CONTROL}/test_decisions.py"
POLICY = f"{CONTROL}/test_measured_policy.py"
SHORT = f"{CONTROL}/test_short_requests.py"
SAVING = f"{CONTROL}/test_saving.py"
FAIRNESS = f"{CONTROL}/test_fairness.py"
SITUATION = f"{UNIT}/speculation/test_situation.py"

CONTROL_MUTANTS = (
    Mutant(
        61,
        "a level's acceptance counts, whatever came before it",
        "control/estimates.py",
        "                chance /= 1 + ranks[0] * factor",
        "                chance = 1 / (1 + ranks[0] * factor)",
        (f"{DECISIONS}::test_a_guess_counts_as_often_as_all_before_it_are_right",),
    ),
    Mutant(
        61,
        "what drafting costs is forgotten",
        "control/asking.py",
        "row + call / asked) / here.per_token",
        "row) / here.per_token",
        (f"{DECISIONS}::test_drafting_is_part_of_the_price",),
    ),
    Mutant(
        61,
        "an empty draft counts as a rejected one",
        "control/estimates.py",
        "            if not depth:\n                counts.fade(self._fading())",
        "            if not depth:\n                counts.judged(0, 1, None)",
        (f"{DECISIONS}::test_an_empty_answer_is_no_rejected_guess",),
    ),
    Mutant(
        61,
        "the plain windows that everything is compared with are not plain",
        "control/measured.py",
        "        arm = None if is_reference else self._best(record, running)",
        "        arm = self._best(record, running)",
        (f"{POLICY}::test_plain_windows_are_plain_and_make_the_reference",),
    ),
    Mutant(
        61,
        "a cohort's estimate is that of another tenant's, too",
        "control/estimates.py",
        "        key = (method, tenant, cohort)",
        '        key = (method, "", cohort)',
        (f"{POLICY}::test_a_cohort_of_one_tenant_says_nothing_of_anothers",),
    ),
    Mutant(
        61,
        "what was saved of one tenant is found by another",
        "control/estimates.py",
        "    return hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest()",
        '    return hashlib.blake2b(b"", digest_size=8).hexdigest()',
        (f"{SAVING}::test_nobody_can_read_whose_cohorts_they_were",),
    ),
    Mutant(
        61,
        "a head does not read the prompts that it will guess behind",
        "control/measured.py",
        "                plans.append(record.read())",
        "                plans.append(record.ask(None))",
        (f"{SHORT}::test_a_head_that_may_guess_later_reads_the_prompt_along_and_is_not_asked",),
    ),
    Mutant(
        61,
        "a step with a prompt in it ends all guessing",
        "control/deciding.py",
        "        alone = here.without_prompts()",
        "        alone = here",
        (f"{SHORT}::test_a_step_with_a_prompt_in_it_is_no_reason_to_give_guessing_up",),
    ),
    Mutant(
        61,
        "what it takes to catch up counts as what a level costs",
        "speculation/measured/call_cost.py",
        "        if behind:\n",
        "        if False:\n",
        (f"{SITUATION}::test_catching_up_is_not_what_a_level_costs",),
    ),
    Mutant(
        61,
        "at a long context nothing is known of what rows add",
        "speculation/measured/costs.py",
        "                band.begin_with(known.points())",
        "                pass",
        (f"{SITUATION}::test_a_longer_context_begins_with_what_rows_add_at_shorter_ones",),
    ),
    Mutant(
        61,
        "what a head's maker has measured is not believed",
        "control/estimates.py",
        "        if level < len(self.told):",
        "        if False:",
        (f"{SHORT}::test_what_a_heads_maker_has_measured_is_believed_until_it_is_seen",),
    ),
    Mutant(
        61,
        "what a head's maker has measured is believed for ever",
        "control/estimates.py",
        "TOLD_STRENGTH = 20.0",
        "TOLD_STRENGTH = 2000.0",
        (f"{SHORT}::test_what_a_heads_maker_has_measured_is_soon_forgotten_where_it_is_not_so",),
    ),
    Mutant(
        61,
        "guesses beside plain requests are not paid for",
        "control/fair_share.py",
        "self._saved + share - added",
        "self._saved + share",
        (f"{FAIRNESS}::test_a_share_that_is_too_small_for_one_step_is_saved_for_another",),
    ),
    Mutant(
        61,
        "what a profile has drafted stays with the drafter",
        "engine/guessing/draft_profile.py",
        "        plan.drafter.forget(as_drafter_sees(request))",
        "        pass",
        (f"{UNIT}/engine/guessing/test_draft_profile.py::test_an_engine_is_none_the_wiser",),
    ),
    Mutant(
        61,
        "a depth that once looked dear is never looked at again",
        "control/arms.py",
        "TRIAL_STEPS = 64",
        "TRIAL_STEPS = 1 << 60",
        (f"{SHORT}::test_a_depth_that_once_looked_dear_is_looked_at_again",),
    ),
    Mutant(
        61,
        "what was counted before a change is believed for long",
        "control/estimates.py",
        "KEPT_DRAFTS = 20.0",
        "KEPT_DRAFTS = 1e9",
        (f"{POLICY}::test_it_leaves_off_soon_and_begins_again_when_guessing_pays_again",),
    ),
)
