"""Defects in following an expected answer, and in who follows it."""

from catalogue import UNIT, Mutant

FOLLOWER = f"{UNIT}/drafters/test_prediction_drafter.py"
POOL = f"{UNIT}/engine/drafting/test_drafter_pool.py"

PREDICTION_MUTANTS = (
    Mutant(
        60,
        "an answer that leaves the expected text never comes back to it",
        "drafters/lookup/prediction.py",
        "Follower.read",
        "self._find()",
        "pass",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "the place found is that of the token itself, not of the next",
        "drafters/lookup/prediction.py",
        "Follower._find",
        "position + 1",
        "position",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "of equal places the farthest wins",
        "drafters/lookup/prediction.py",
        "Follower._find",
        "self._certain - position",
        "position - self._certain",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "a place that chance has found moves the search on",
        "drafters/lookup/prediction.py",
        "Follower._move_to",
        "_CERTAIN_TOKENS",
        "1",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "a text of one token over and over is compared everywhere",
        "drafters/lookup/prediction.py",
        "Follower._find",
        "positions[here:here + _MAX_CANDIDATES]",
        "positions[here:]",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "the prompt is read as if it were the answer",
        "drafters/lookup/prediction.py",
        "PredictionDrafter.draft",
        "request.tokens[request.prompt_len + follower.read_tokens:]",
        "request.tokens[follower.read_tokens:]",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "a prediction overrules a request that wants no guesses",
        "engine/drafting/drafter_pool.py",
        "DrafterPool._hint_configs",
        "setting is False or self._build is None",
        "self._build is None",
        (POOL,),
    ),
    Mutant(
        60,
        "a drafter behind a prediction is closed while it is used",
        "engine/drafting/known_answers.py",
        "drafters_of",
        "list(parts_of(plan.drafter))",
        "[plan.drafter]",
        (POOL,),
    ),
)
