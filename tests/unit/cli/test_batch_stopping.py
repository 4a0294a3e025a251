"""Signals that end `foreword batch`."""

import asyncio
import signal

import pytest
import typer

from foreword.cli.batch import _stopping
from foreword.server.batch import Batch


async def terminated() -> None:
    asyncio.get_running_loop().call_later(0.01, signal.raise_signal, signal.SIGTERM)
    await asyncio.sleep(5)


@pytest.mark.parametrize("ctrl_c", [signal.default_int_handler, signal.SIG_IGN])
def test_a_run_ends_at_sigterm_even_where_ctrl_c_is_ignored(ctrl_c, capsys):
    """A shell that starts a command in the background of a script has it ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, ctrl_c)
    try:
        with pytest.raises(typer.Exit) as ended, _stopping(Batch()):
            asyncio.run(terminated())
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.exit_code == 128 + signal.SIGTERM
    assert "the same command continues" in capsys.readouterr().err
