"""`foreword prove --url` on a server that does not stay: the verdicts so far are shown."""

from types import SimpleNamespace

import pytest

from foreword.cli.prove import server as command
from foreword.cli.prove.main import Prove
from foreword.errors import RequestError
from foreword.proofs.server import examination
from foreword.proofs.server.context import BRIEF, Abilities, ClaimStatus, ClaimVerdict, ProofContext


@pytest.mark.parametrize("end", [RequestError("the server does not answer"), KeyboardInterrupt()])
@pytest.mark.parametrize("verdicts", [0, 1])
def test_the_verdicts_so_far_are_shown(monkeypatch, capsys, end: BaseException, verdicts: int):
    server = SimpleNamespace(model="m", address="http://x/v1/completions", requests=0)

    async def servers(*_):
        return server, None

    async def prepare(*_):
        return ProofContext(server, BRIEF, Abilities({}))

    async def examine(*_):
        for _ in range(verdicts):
            yield ClaimVerdict(ClaimStatus.HELD, 4, check="seed alone")
        raise end

    monkeypatch.setattr(command, "_servers", servers)
    monkeypatch.setattr(examination, "prepare", prepare)
    monkeypatch.setattr(examination, "examine", examine)
    with pytest.raises(type(end)):
        command.prove_server(Prove(url="http://x"), BRIEF, None)
    printed = capsys.readouterr().out
    is_shown = "held in 4" in printed and "none of 1 claims refuted" in printed
    assert is_shown == ("claims refuted" in printed) == bool(verdicts)
