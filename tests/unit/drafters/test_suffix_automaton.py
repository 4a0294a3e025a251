"""The automaton against brute force over all substrings."""

import random

import pytest

from foreword.drafters.lookup.suffix_automaton import ROOT, SuffixAutomaton


def walk(automaton: SuffixAutomaton, tokens: list[int]) -> int | None:
    state = ROOT
    for token in tokens:
        if token not in automaton.edges[state]:
            return None
        state = automaton.edges[state][token]
    return state


def occurrences(texts: list[list[int]], part: list[int]) -> int:
    return sum(
        text[end - len(part) : end] == part for text in texts for end in range(len(part), len(text) + 1)
    )


@pytest.mark.parametrize("seed", range(10))
def test_substrings_and_counts_equal_brute_force(seed: int):
    rng = random.Random(seed)
    texts = [[rng.randrange(3) for _ in range(rng.randint(1, 25))] for _ in range(rng.randint(1, 4))]
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.start_text()
        automaton.extend(text)
    assert len(automaton.edges) <= 2 * automaton.num_tokens + 1
    for _ in range(200):
        part = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        state = walk(automaton, part)
        expected = occurrences(texts, part)
        assert (0 if state is None else automaton.counts[state]) == expected


@pytest.mark.parametrize("seed", range(8))
def test_the_earlier_suffix_is_the_longest_that_occurred_before(seed: int):
    rng = random.Random(seed)
    automaton, text = SuffixAutomaton(), []
    for _ in range(40):
        token = rng.randrange(3)
        text.append(token)
        automaton.extend([token])
        known = [
            n for n in range(1, len(text)) if any(text[i : i + n] == text[-n:] for i in range(len(text) - n))
        ]
        assert automaton.lengths[automaton.earlier_suffix()] == max(known, default=0)


@pytest.mark.parametrize("seed", range(8))
def test_following_another_text_keeps_its_longest_known_suffix(seed: int):
    rng = random.Random(seed)
    known = [rng.randrange(4) for _ in range(60)]
    automaton = SuffixAutomaton()
    automaton.extend(known)
    state, length, text = ROOT, 0, []
    for _ in range(80):
        token = rng.randrange(5)  # 4 never occurs
        text.append(token)
        state, length = automaton.follow(state, length, token)
        best = max(n for n in range(len(text) + 1) if n == 0 or occurrences([known], text[-n:]))
        assert length == best
        assert walk(automaton, text[len(text) - length :]) == state
