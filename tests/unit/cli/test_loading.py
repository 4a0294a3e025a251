"""What the commands share: loading."""

import sys
from pathlib import Path

import pytest

from foreword.cli import console, main
from foreword.engine.collection import spare_steps
from helpers.tiny_models import make_hf_model


def test_a_command_has_the_collector_leave_what_is_loaded_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """To walk through all of it takes a tenth of a second. Whoever has the process to himself says so: not a test."""
    monkeypatch.setattr(console, "after_loading", lambda: None)
    monkeypatch.setattr(sys, "argv", ["foreword", "--version"])
    with pytest.raises(SystemExit):
        main.main()
    assert console.after_loading is spare_steps
    calls: list[str] = []
    monkeypatch.setattr(console, "after_loading", lambda: calls.append("loaded"))
    console.load_llm(
        str(make_hf_model(tmp_path / "tiny", "llama")), dtype="float32", device="cpu", backend="torch"
    )
    assert calls == ["loaded"]
