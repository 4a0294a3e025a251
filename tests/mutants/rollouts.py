"""Defects of policy files and roll-outs: who gets which drafter, what is noticed, what is remembered."""

from catalogue import UNIT, Mutant

PAIR = f"{UNIT}/control/rollout/test_pair.py"
SAVED = f"{UNIT}/control/rollout/test_saved.py"
ENGINE = f"{UNIT}/engine/policy/test_rollouts_in_an_engine.py"
STEERING = f"{UNIT}/engine/policy/test_controller.py"
ADVICE = f"{UNIT}/control/reporting/test_advising.py"

ROLLOUT_MUTANTS = (
    Mutant(
        81,
        "guesses of a drafter in the shadow are used",
        "control/rollout/pair.py",
        "Gate.is_open",
        "self.is_live and (not self.switch.is_off) and (not self.switch.is_paused)",
        "not self.switch.is_off and (not self.switch.is_paused)",
        (f"{ENGINE}::test_in_the_shadow_and_while_it_is_verified_no_guess_is_used",),
    ),
    Mutant(
        81,
        "a rollback leaves requests that run with the drafter",
        "control/rollout/pair.py",
        "PairRollout.move",
        "self.switch.is_off = True",
        "pass",
        (PAIR,),
    ),
    Mutant(
        81,
        "a text that comes out differently is not noticed",
        "engine/policy/verification.py",
        "find_difference",
        "again != sample.tokens",
        "len(again) != len(sample.tokens)",
        (f"{ENGINE}::test_one_that_changes_texts_is_found_out_before_anybody_is_served",),
    ),
    Mutant(
        81,
        "requests change their arm when the canary grows",
        "control/rollout/pair.py",
        "PairRollout.is_canary",
        "(self.rule.salt, self.rule.drafter, self.rule.cohort, tenant, request_id)",
        "(self.rule.salt, self.rule.drafter, self.rule.cohort, tenant, request_id, str(self.step))",
        (f"{PAIR}::test_requests_stay_in_their_arm_while_the_canary_grows",),
    ),
    Mutant(
        81,
        "a restart begins every roll-out anew",
        "control/rollout/rollouts.py",
        "Rollouts._fresh",
        "state is not None and state['salt'] == rule.salt",
        "False",
        (f"{SAVED}::test_a_restart_goes_on_where_it_was",),
    ),
    Mutant(
        81,
        "another model's state is taken over",
        "control/rollout/rollouts.py",
        "_read_states",
        "value['version'] != VERSION or value['made_for'] != dict(environment)",
        "value['version'] != VERSION",
        (f"{SAVED}::test_another_models_file_is_ignored",),
    ),
    Mutant(
        81,
        "a drafter that crashes is asked again and again",
        "engine/policy/health.py",
        "Baselines.health",
        "faults - start.faults",
        "0",
        (f"{ENGINE}::test_one_that_goes_bad_when_it_is_in_use_is_rolled_back",),
    ),
    Mutant(
        81,
        "a broken file takes the place of a good one",
        "engine/policy/controller.py",
        "PolicyFileController._reload_if_changed",
        "try:\n"
        "    document = read_policy(self.path)\n"
        "    configs = drafter_configs(document)\n"
        "except ForewordError as error:\n"
        "    _log.warning('%s has changed and is not used, the old one stays: %s', self.path, error)\n"
        "    return",
        "try:\n"
        "    document = read_policy(self.path)\n"
        "    configs = drafter_configs(document)\n"
        "except ForewordError as error:\n"
        "    _log.warning('%s has changed and is not used, the old one stays: %s', self.path, error)\n"
        "    document, configs = (PolicyFile(), {})",
        (f"{STEERING}::test_a_file_that_is_broken_leaves_the_old_one_with_one_line",),
    ),
    Mutant(
        81,
        "the last rule that fits wins",
        "control/policy_file/document.py",
        "PolicyFile.cohort",
        "self.cohorts",
        "reversed(self.cohorts)",
        (f"{UNIT}/control/policy_file/test_parsing.py::test_the_first_rule_that_fits_wins",),
    ),
    Mutant(
        81,
        "what is checked in idle time is told to somebody",
        "engine/core.py",
        "EngineCore._deltas",
        "(result.verdict.tokens or has_ended) and (not request.identity.assigned.is_replay)",
        "result.verdict.tokens or has_ended",
        ("tests/integration/test_policy_texts.py::test_texts_are_those_of_plain_decoding",),
    ),
    Mutant(
        81,
        "the law of texts is compared with itself",
        "control/rollout/pair.py",
        "PairRollout.add_samples",
        "drafted",
        "plain",
        (f"{ENGINE}::test_one_that_changes_the_law_of_drawn_texts_is_found_out",),
    ),
    Mutant(
        81,
        "answers whose law is compared are drawn with one seed",
        "engine/policy/verification.py",
        "IdleChecks._params",
        "self.seeds.getrandbits(63)",
        "0",
        (f"{ENGINE}::test_answers_whose_law_is_compared_have_seeds_of_their_own",),
    ),
    Mutant(
        81,
        "a drafter is blamed for the faults of another with its method",
        "engine/drafting/drafter_pool.py",
        "DrafterPool.created_by",
        "with self._lock:\n"
        "    drafter = self._drafters.get(config.drafter_key)\n"
        "return [] if drafter is None else [drafter]",
        "with self._lock:\n"
        "    name = '+'.join(config.method)\n"
        "    return [d for d in self._drafters.values() if getattr(d, '_name', None) == name]",
        (f"{ENGINE}::test_a_drafter_is_not_blamed_for_another_with_the_same_method",),
    ),
)
