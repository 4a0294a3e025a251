"""Families are declared once, and nothing outside their files tests a family's name."""

import re
from pathlib import Path

import foreword
from foreword.models.architectures.registry import ARCHITECTURES, BY_HF_CLASS, gguf_family_named

SOURCE = Path(foreword.__file__).parent


def test_every_family_has_names_of_its_own():
    assert len({family.name for family in ARCHITECTURES}) == len(ARCHITECTURES)
    assert len(BY_HF_CLASS) == len(ARCHITECTURES)
    for family in (family for family in ARCHITECTURES if family.gguf is not None):
        scores = None if family.experts is None else family.experts.scores
        assert gguf_family_named(family.gguf.architecture, scores) is family


def test_formats_and_backends_test_no_familys_name():
    names = "|".join(family.name for family in ARCHITECTURES)
    tested = re.compile(
        rf"(architecture|family|family\.name)\s*(==|!=|in|not in)\s*[\(\[{{]?[\"'](?:{names})[\"']"
    )
    for room in ("models/formats", "models/pruning", "backends"):
        for path in (SOURCE / room).rglob("*.py"):
            assert not tested.search(path.read_text(encoding="utf-8")), path
