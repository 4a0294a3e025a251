"""What a form costs is told whole, on a clock that only passes and masks move."""

from pathlib import Path

import pytest

from foreword.bench.structured import measure_structured
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore, EngineParts
from foreword.engine.loader import load_model
from foreword.errors import RequestError
from foreword.structured.state import GrammarState

PASS, MASK = 0.010, 0.001


def test_masks_are_counted_wherever_in_a_step_they_are_worked_out(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 0.0

    def after(seconds: float, work):
        def timed(*args, **kwargs):
            nonlocal now
            now += seconds
            return work(*args, **kwargs)

        return timed

    model = load_model(str(tiny_model), device="cpu", dtype="float32")
    parts = EngineParts(
        EngineConfig(kv_cache_memory_bytes=1 << 22), build_drafter=model.build_drafter, clock=lambda: now
    )
    engine = EngineCore(model.decoder, model.vocabulary(), parts)
    monkeypatch.setattr(GrammarState, "masks", after(MASK, GrammarState.masks))
    monkeypatch.setattr(model.decoder, "forward", after(PASS, model.decoder.forward))
    rows, mask_share = measure_structured(engine, model.tokenizer.encode, 2, 60, 1, lambda *_: None)
    assert mask_share == pytest.approx(2 * MASK / PASS)
    ways = {row.way: row for row in rows}
    assert set(ways) == {"no schema, plain", "schema, plain", "schema, grammar"}
    assert ways["no schema, plain"].step_ms == pytest.approx(1e3 * PASS)
    assert ways["schema, grammar"].tokens_per_pass > 1
    with pytest.raises(RequestError, match="--tokens at least 8"):
        measure_structured(engine, model.tokenizer.encode, 2, 7, 1, lambda *_: None)
    # Eight tokens end before the prompts of a large batch are read.
    with pytest.raises(RequestError, match="--tokens 8: an answer ended before"):
        measure_structured(engine, model.tokenizer.encode, 24, 8, 1, lambda *_: None)
