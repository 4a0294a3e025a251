"""Defects in following an expected answer, and in who follows it."""

from catalogue import UNIT, Mutant

FOLLOWER = f"{UNIT}/drafters/test_prediction_drafter.py"
POOL = f"{UNIT}/engine/guessing/test_drafter_pool.py"

PREDICTION_MUTANTS = (
    Mutant(
        60,
        "an answer that leaves the expected text never comes back to it",
        "drafters/lookup/prediction.py",
        "                self._find()",
        "                pass",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "the place found is that of the token itself, not of the next",
        "drafters/lookup/prediction.py",
        "            self._go_on(place + 1, length,",
        "            self._go_on(place, length,",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "of equal places the farthest wins",
        "drafters/lookup/prediction.py",
        "(length, self._certain - place, place)",
        "(length, place - self._certain, place)",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "a place that chance has found moves the search on",
        "drafters/lookup/prediction.py",
        "        if run >= _TRUSTED:\n            self._certain",
        "        if run >= 1:\n            self._certain",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "a text of one token over and over is compared everywhere",
        "drafters/lookup/prediction.py",
        "places[here : here + _LOOKED_AT]",
        "places[here:]",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "the prompt is read as if it were the answer",
        "drafters/lookup/prediction.py",
        "follower.read(request.tokens[request.prompt_len + follower.read_tokens :])",
        "follower.read(request.tokens[follower.read_tokens :])",
        (FOLLOWER,),
    ),
    Mutant(
        60,
        "a prediction overrules a request that wants no guesses",
        "engine/guessing/drafter_pool.py",
        "[] if setting is False or self._build is None else",
        "[] if self._build is None else",
        (POOL,),
    ),
    Mutant(
        60,
        "a drafter behind a prediction is closed while it is used",
        "engine/guessing/drafter_pool.py",
        "    return () if plan is None else list(parts_of(plan.drafter))",
        "    return () if plan is None else [plan.drafter]",
        (POOL,),
    ),
)
