"""What `foreword bench link` refuses, and what it says of a node that cannot be measured."""

import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from foreword.cli.bench.nodes import Link
from foreword.cli.cluster.main import draft_node
from foreword.cli.options.grouped import command
from foreword.errors import RequestError

link = command(Link)


@pytest.mark.parametrize("run", [link, draft_node])
def test_without_the_server_extra_one_line_says_what_to_install(run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)  # it is not installed
    with pytest.raises(RequestError, match="one more package") as refused:
        run()
    assert "pip install 'foreword[server]'" in str(refused.value)


def test_a_node_on_another_machine_needs_token_and_tls(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FOREWORD_CLUSTER_TOKEN", raising=False)
    with pytest.raises(RequestError, match=r"192\.0\.2\.1:8400 .* a cluster token .* TLS files"):
        link(drafters="192.0.2.1:8400")


def test_the_node_that_is_started_gets_the_token_and_the_certificates(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    token, pem = tmp_path / "token", tmp_path / "one.pem"
    token.write_text("a token of this cluster")
    token.chmod(0o600)
    pem.touch()
    started: list[list[str]] = []

    def start(command: list[str], **_: object) -> NoReturn:
        started.append(command)
        raise RequestError("enough")

    monkeypatch.setattr(subprocess, "Popen", start)
    tls = ",".join([str(pem)] * 3)
    with pytest.raises(RequestError, match="enough"):
        link(model=str(tiny_model), token_file=token, tls=tls)
    ((_, _, _, *given),) = started
    assert given[given.index("--token-file") + 1] == str(token)
    assert given[given.index("--tls") + 1] == tls


def test_a_failed_handshake_is_told_with_its_address(tiny_model: Path):
    with socket.create_server(("127.0.0.1", 0)) as nobody:

        def hang_up() -> None:
            nobody.accept()[0].close()

        hangs_up = threading.Thread(target=hang_up)
        hangs_up.start()
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(RequestError, match=f"draft node {address}: .* during the handshake"):
            link(model=str(tiny_model), drafters=address)
        hangs_up.join()
