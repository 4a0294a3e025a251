"""What is kept of a machine's costs."""

from pathlib import Path

import pytest

from foreword.engine.guessing.cost_profile import _read


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"points": []}',
        '{"points": [[1, 0]]}',
        '{"points": [[0, 0.1]]}',
        '{"points": [[1e999, 0.1]]}',
        '{"points": [[1, 1e999]]}',
        '{"points": [[1, NaN]]}',
        f'{{"points": [[1, {10**400}]]}}',
    ],
)
def test_a_damaged_profile_is_none(tmp_path: Path, text: str):
    file = tmp_path / "profile.json"
    file.write_text(text)
    assert _read(file) is None


def test_a_profile_is_read(tmp_path: Path):
    file = tmp_path / "profile.json"
    file.write_text('{"points": [[1, 0.01], [8, 0.02]]}')
    assert _read(file) == [(1.0, 0.01), (8.0, 0.02)]
