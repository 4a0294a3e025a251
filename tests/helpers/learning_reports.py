"""A learner's report, for tests of what shows it."""

from foreword.engine.learning import LearningReport, VersionReport

TRAINED = LearningReport(
    "rolling out",
    texts=12,
    tokens=3400,
    new_tokens=1500,
    wanted_tokens=20_000,
    trainings=3,
    failures=1,
    train_seconds=90.0,
    busy_seconds=2.5,
    version=1,
    versions=(
        VersionReport(1, "on", "", 1.7e9, 21_000, 40.0, 1.5, 1.8),
        VersionReport(2, "canary", "10% of requests", 1.7e9 + 600, 20_500, 45.0, 1.8, 2.1),
    ),
)
