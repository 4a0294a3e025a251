"""Schemas of many kinds: what fits is allowed, what does not is not, and whatever is written fits."""

import json
import random
import sys

import jsonschema_rs
import numpy as np
import pytest

from foreword.structured.compiled import GrammarTokens
from foreword.structured.compiler import Grammars
from foreword.structured.params import StructuredOutputs
from foreword.structured.state import GrammarError, GrammarState, unpacked
from helpers.schema_corpus import SchemaCase, corpus

END = 256
BYTES = Grammars(
    lambda: GrammarTokens(
        [*(bytes([b]) for b in range(256)), b"<end>"], (END,), lambda t: list(t.encode()), (END,)
    )
)
CASES = corpus()


def begin(case: SchemaCase) -> GrammarState:
    return BYTES.begin(StructuredOutputs(json=case.schema))


def can_be_written(case: SchemaCase, value: object) -> bool:
    """In any of the ways to escape a text."""
    return any(
        is_allowed(begin(case), json.dumps(value, ensure_ascii=ascii_only)) for ascii_only in (False, True)
    )


def is_allowed(state: GrammarState, text: str) -> bool:
    try:
        state.commit([*text.encode()])
    except GrammarError:
        return False
    return bool(unpacked(state.masks((), ()), 257)[0, END])


def write(case: SchemaCase, rng: random.Random, most: int = 400) -> tuple[bytes, bool]:
    """A random answer, ended as soon as it can be half of the time; and whether it has ended."""
    state, written = begin(case), bytearray()
    while len(written) < most:
        possible = np.flatnonzero(unpacked(state.masks((), ()), 257)[0]).tolist()
        assert possible
        if END in possible and (len(possible) == 1 or rng.random() < 0.5):
            return bytes(written), True
        closing = [byte for byte in possible if byte in (*b'"]}0',)]
        pick = (
            rng.choice(closing)
            if closing and rng.random() < 0.5
            else rng.choice([p for p in possible if p != END])
        )
        state.commit([pick])
        written.append(pick)
    return bytes(written), False


def check_written(case: SchemaCase, rng: random.Random) -> bool:
    written, has_ended = write(case, rng)
    if has_ended:
        value = json.loads(written.decode(), parse_float=_finite)
        is_valid = jsonschema_rs.validator_for(case.schema, validate_formats=False).is_valid(value)
        assert is_valid, f"{written!r} does not fit {case.schema}"
    return has_ended


def _finite(number: str) -> float:
    """JSON's numbers have no bounds, Python's have: one that is too large is taken for a large one."""
    return max(min(float(number), sys.float_info.max), -sys.float_info.max)


def test_there_are_many_and_no_two_are_the_same():
    assert len(CASES) >= 150
    assert len({case.name for case in CASES}) == len(CASES)
    assert len({json.dumps(case.schema) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("part", range(4))
def test_what_fits_can_be_written_and_what_does_not_cannot(part: int):
    for case in CASES[part::4]:
        for value in case.valid:
            assert can_be_written(case, value), f"{case.name}: {value!r} fits {case.schema}"
        for value in case.invalid:
            assert not can_be_written(case, value), f"{case.name}: {value!r} does not fit {case.schema}"


def test_whatever_is_written_fits():
    ended = sum(check_written(case, random.Random(case.name)) for case in CASES)
    assert ended > len(CASES) // 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_written_fits_however_often(seed: int):
    for case in CASES:
        check_written(case, random.Random(f"{case.name} {seed}"))
