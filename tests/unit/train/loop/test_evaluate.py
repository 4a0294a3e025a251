"""The walk along a text counts what decoding with guesses would."""

import random

from foreword.train.loop.evaluate import walk
from foreword.train.passes.packing import tail_begin
from foreword.train.texts.documents import make_document


def _decode(first: int, end: int, right: dict[int, int], depth: int) -> tuple[int, int]:
    """Committed tokens and passes when the newest token stands at `first` and right[p] guesses after p are right."""
    newest, tokens, passes = first, 0, 0
    while newest < end - 1:
        passes += 1
        for _ in range(min(right[newest], depth) + 1):
            if newest < end - 1:
                newest += 1
                tokens += 1
    return tokens, passes


def test_a_walk_is_decoding():
    dice = random.Random(0)
    for _ in range(200):
        prompt, answer, depth = dice.randint(2, 6), dice.randint(1, 12), dice.randint(1, 4)
        more = dice.randint(0, 3)  # a user's next words do not belong to the answer
        document = make_document(list(range(prompt + answer + more)), [(prompt, prompt + answer)], "x", 0.0)
        right = {place: dice.randint(0, 5) for place in range(prompt + answer + more)}
        accepted = [right.get(slot + 1, 0) for slot in range(tail_begin(document), len(document.tokens))]
        runs = walk(accepted, document, depth)
        assert (sum(runs) + len(runs), len(runs)) == _decode(prompt, prompt + answer, right, depth)
