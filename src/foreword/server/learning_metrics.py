"""Metrics of a head that is trained on served texts, for `Metrics`."""

from collections.abc import Iterator

from foreword.engine.learning import LearningReport

STATES = ("collecting", "training", "paused", "rolling out", "failed")
"""Values of `LearningReport.state`."""

# (field of `LearningReport`, metric, help)
_FIELD_GAUGES = (
    ("texts", "learn_texts", "Served texts that are kept for training the head."),
    ("tokens", "learn_tokens", "Tokens of the kept texts."),
    ("new_tokens", "learn_new_tokens", "Answer tokens since the last training of the head."),
    ("wanted_tokens", "learn_wanted_tokens", "New answer tokens that begin a training of the head."),
)
_FIELD_TOTALS = (
    ("trainings", "learn_trainings", "Trainings of the head that ended, failed ones included."),
    ("failures", "learn_failures", "Trainings of the head that failed."),
    ("train_seconds", "learn_train_seconds", "Time in which the head was trained."),
    ("busy_seconds", "learn_busy_seconds", "Time of training while requests were running."),
)

GAUGES = (
    *(tuple(entry) for _, *entry in _FIELD_GAUGES),
    (
        "learn_version",
        "Version of the head in use for all requests; 0: the one that the engine started with.",
    ),
    ("learn_state", "1 for the state that the training of the head is in.", "state"),
    (
        "learn_tokens_per_pass",
        "Tokens per pass on held-out texts of the traffic: newest trained version, and the head before it.",
        "head",
    ),
)
COUNTERS = tuple(tuple(entry) for _, *entry in _FIELD_TOTALS)
"""Metrics: (name, help, *labels)."""


def gauges(report: LearningReport) -> Iterator[tuple[str, float, *tuple[str, ...]]]:
    """Yield (metric, value, *labels) of all gauges that have a value."""
    for field, name, _ in _FIELD_GAUGES:
        yield name, getattr(report, field)
    yield "learn_version", report.version or 0
    for state in STATES:
        yield "learn_state", report.state == state, state
    if report.versions:
        newest = report.versions[-1]
        yield "learn_tokens_per_pass", newest.tau_before, "before"
        yield "learn_tokens_per_pass", newest.tau_after, "newest"


def totals(report: LearningReport) -> dict[str, float]:
    """Return the engine's totals by metric."""
    return {name: getattr(report, field) for field, name, _ in _FIELD_TOTALS}
