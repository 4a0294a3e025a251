"""Defects of the examination of servers from outside."""

from catalogue import UNIT, Mutant

EXAMINATION = f"{UNIT}/proofs/server/test_examination.py"
BUG = 103

SERVER_PROOF_MUTANTS = (
    Mutant(
        BUG,
        "a penalty that a server has on by default stays on for greedy requests",
        "proofs/server/context.py",
        "ProofContext.greedy",
        "{**body, **self.abilities.filters_off, **fields}",
        "{**body, **fields}",
        (f"{EXAMINATION}::test_a_penalty_that_is_on_by_default_refutes_nothing",),
    ),
    Mutant(
        BUG,
        "one of the usual names of the repetition penalty is missing",
        "proofs/server/context.py",
        "",
        "{'top_p': 1.0, 'top_k': 0, 'min_p': 0.0, 'typical_p': 1.0, 'presence_penalty': 0.0, "
        "'frequency_penalty': 0.0, 'repetition_penalty': 1.0, 'repeat_penalty': 1.0, 'dry_multiplier': "
        "0.0, 'xtc_probability': 0.0, 'mirostat': 0, 'mirostat_mode': 0}",
        "{'top_p': 1.0, 'top_k': 0, 'min_p': 0.0, 'typical_p': 1.0, 'presence_penalty': 0.0, "
        "'frequency_penalty': 0.0, 'repetition_penalty': 1.0, 'dry_multiplier': 0.0, 'xtc_probability': "
        "0.0, 'mirostat': 0, 'mirostat_mode': 0}",
        (f"{EXAMINATION}::test_a_penalty_that_is_on_by_default_refutes_nothing",),
    ),
    Mutant(
        BUG,
        "texts that differ late are compared at their beginning only",
        "proofs/server/context.py",
        "",
        "128",
        "24",
        (f"{EXAMINATION}::test_every_form_compares_texts_beyond_a_late_change",),
    ),
    Mutant(
        BUG,
        "texts that differ at near-ties are said to hold",
        "proofs/server/comparing.py",
        "agree",
        "not ties",
        "True",
        (f"{EXAMINATION}::test_texts_that_part_at_near_ties_are_not_said_to_hold",),
    ),
    Mutant(
        BUG,
        "a stream that was cut for another request passes for an answer",
        "proofs/server/comparing.py",
        "_failure",
        "'the answer was cut off: it has no finish_reason' if result.is_cut else ''",
        "''",
        (
            f"{EXAMINATION}::test_streams_cut_by_another_request_fail_under_concurrency_with_the_requests_that_show_it",
        ),
    ),
    Mutant(
        BUG,
        "draws are made at once although requests fail then",
        "proofs/server/examination.py",
        "examine",
        "replace(plan, at_once=1)",
        "replace(plan, prompts=plan.prompts)",
        (f"{EXAMINATION}::test_draws_are_made_one_at_a_time_where_requests_fail_under_concurrency",),
    ),
    Mutant(
        BUG,
        "draws of one answer each are skipped because n is ignored",
        "proofs/server/examination.py",
        "_verdict",
        "refuted_names - unused",
        "refuted_names",
        (f"{EXAMINATION}::test_draws_do_not_rest_on_n_where_each_takes_a_request_of_its_own",),
    ),
    Mutant(
        BUG,
        "a failure that happens alone too is blamed on concurrency",
        "proofs/server/comparing.py",
        "send_together",
        "isinstance(result, ServerAnswer) and alone.is_cut",
        "False",
        (f"{EXAMINATION}::test_a_stream_that_breaks_off_alone_too_is_no_matter_of_concurrency",),
    ),
    Mutant(
        BUG,
        "a server that fails at an optional field is not examined at all",
        "proofs/server/context.py",
        "_answer",
        "(Broken, RefusedByServer)",
        "RefusedByServer",
        (f"{EXAMINATION}::test_a_server_that_fails_at_an_optional_field_is_examined_without_it",),
    ),
)
