"""Shell completion knows the built-in models; without a match the shell completes paths."""

import pytest
from typer.main import get_command

from foreword.cli.main import app


@pytest.mark.parametrize(("command", "field"), [("run", "model"), ("serve", "model"), ("chat", "model")])
def test_built_in_models_are_completed(command: str, field: str):
    found = get_command(app).commands[command]
    with found.make_context(command, [], resilient_parsing=True) as context:
        (model,) = [one for one in found.params if one.name == field]
        assert [item.value for item in model.shell_complete(context, "smol")] == ["smollm2-135m"]
        assert model.shell_complete(context, "./") == []
