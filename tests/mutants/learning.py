"""Defects of `foreword serve --learn`: what is kept and deleted, when a training runs, and which heads are used."""

from catalogue import UNIT, Mutant

LEARNER = f"{UNIT}/learn/test_learner.py"
TEXTS = f"{UNIT}/learn/test_served_texts.py"
PAUSES = f"{UNIT}/learn/test_pauses.py"

LEARNING_MUTANTS = (
    Mutant(
        122,
        "a training does not pause for requests",
        "learn/pausing.py",
        "Pauses.busy",
        "not self.is_paused and self._credit <= 0",
        "False",
        (f"{PAUSES}::test_requests_pause_it_at_once",),
    ),
    Mutant(
        122,
        "a head is measured on texts that it was trained on",
        "learn/texts.py",
        "_hold_out_one",
        "digest != smallest",
        "True",
        (f"{TEXTS}::test_at_least_one_prompt_is_held_out",),
    ),
    Mutant(
        122,
        "the texts of tenants who do not take part are kept",
        "learn/texts.py",
        "ServedTexts.add",
        "not settings.takes_part(tenant)",
        "False",
        (f"{TEXTS}::test_short_long_and_foreign_texts_are_not_kept",),
    ),
    Mutant(
        122,
        "stored texts of tenants who take part no more are trained on",
        "learn/stored_texts.py",
        "read_texts",
        "not takes_part(tenant)",
        "False",
        (f"{TEXTS}::test_stored_texts_of_tenants_that_no_longer_take_part_are_deleted",),
    ),
    Mutant(
        122,
        "a tenant's texts stay in heads trained on those of a parent",
        "learn/learner.py",
        "HeadLearner._judge",
        "{*result.texts.tenants, *parents}",
        "{*result.texts.tenants}",
        (f"{LEARNER}::test_forget_deletes_all_versions_that_descend_from_the_texts",),
    ),
    Mutant(
        122,
        "texts of a training that is stopped early are written afterwards and stay",
        "learn/training.py",
        "Trainings.stop",
        "self.work.add(lambda: _remove(run))",
        "_remove(run)",
        (f"{LEARNER}::test_a_training_that_is_stopped_while_it_is_prepared_leaves_nothing",),
    ),
    Mutant(
        122,
        "a head with weights that are not finite is used",
        "learn/trainer.py",
        "check_finite",
        "not bool(torch.isfinite(tensor).all())",
        "bool(torch.isnan(tensor).all())",
        ("tests/integration/test_learning.py::test_a_head_with_weights_that_are_not_finite_is_no_result",),
    ),
    Mutant(
        122,
        "a damaged log holds up all further trainings",
        "learn/training.py",
        "Trainings._read",
        "run.error = _one_line(error)",
        "",
        (f"{LEARNER}::test_a_damaged_log_fails_the_training",),
    ),
)
