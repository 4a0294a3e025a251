"""Made-up measurements."""

from dataclasses import replace

from foreword.bench.drafters.decode import DecodeRun, Record

PLAIN_RUN = DecodeRun(
    tokens=60,
    passes=60,
    drafted=0,
    accepted=0,
    seconds=6.0,
    draft_seconds=0.0,
    verify_seconds=5.0,
    accept_seconds=0.5,
    memory_bytes=None,
    token_ids=(1, 2, 3),
)

GUESSING_RUN = replace(
    PLAIN_RUN,
    passes=20,
    drafted=80,
    accepted=40,
    seconds=3.0,
    draft_seconds=0.1,
    verify_seconds=2.4,
    accept_seconds=0.3,
)


def record(drafter: str, prompt: str, category: str = "chat", **speculative: object) -> Record:
    guessing = replace(GUESSING_RUN, **speculative)  # type: ignore[arg-type]
    return Record(drafter, prompt, category, guessing, PLAIN_RUN)
