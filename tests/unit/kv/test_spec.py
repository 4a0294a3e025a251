"""What a row of KV memory takes."""

import pytest

from foreword.kv.spec import PageSpec, RowSpec

ROWS = RowSpec("decoder", num_layers=3, num_kv_heads=2, head_dim=20)


def test_keys_and_values_of_all_layers_count():
    assert ROWS.bytes_per_row == 3 * 2 * (20 + 20) * 4
    assert RowSpec("decoder", 3, 2, 20, dtype="bfloat16").bytes_per_row == 3 * 2 * 40 * 2


def test_a_row_in_int8_has_a_scale_for_every_head():
    assert RowSpec("decoder", 3, 2, 20, dtype="int8").bytes_per_row == 3 * 2 * 2 * (20 + 4)
    assert RowSpec("decoder", 3, 2, 20, dtype="int8", alignment=8).bytes_per_row == 3 * 2 * 2 * (24 + 4)


def test_a_head_may_be_filled_up():
    assert RowSpec("decoder", 3, 2, 20, alignment=8).bytes_per_row == 3 * 2 * (24 + 24) * 4


def test_latent_rows_are_one_head_without_values():
    assert RowSpec("decoder", 27, 1, 576, value_dim=0, dtype="bfloat16").bytes_per_row == 27 * 576 * 2


def test_rows_of_others_are_stored_like_the_decoders():
    decoder = RowSpec("decoder", 3, 2, 20, dtype="bfloat16", alignment=8)
    page = PageSpec.of(decoder, [RowSpec("head", 1, 2, 20)])
    assert page.extra == (RowSpec("head", 1, 2, 20, dtype="bfloat16", alignment=8),)
    assert page.bytes_per_row == 4 * 2 * 48 * 2
    assert page.index("head") == 1
    with pytest.raises(KeyError, match="decoder, head"):
        page.index("tail")


def test_what_cannot_be_a_row_is_refused():
    with pytest.raises(ValueError, match="same name"):
        PageSpec.of(ROWS, [RowSpec("decoder", 1, 1, 8)])
    with pytest.raises(ValueError, match="int3"):
        RowSpec("decoder", 1, 1, 8, dtype="int3")
    for wrong in ({"num_layers": 0}, {"head_dim": 0}, {"value_dim": -1}, {"alignment": 0}):
        with pytest.raises(ValueError, match="needs at least one"):
            RowSpec(**({"name": "x", "num_layers": 1, "num_kv_heads": 1, "head_dim": 1} | wrong))  # type: ignore[arg-type]
