"""More half-open connections than the process may have: others are answered all the same, and the log stays short."""

import contextlib
import os
import socket

from helpers.serve_process import serve

FILES = int(os.environ.get("FOREWORD_FLOOD_FILES", "128"))  # the trial was 1024
HALF_A_HEADER = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-"


def test_half_open_connections_do_not_stop_the_server(tiny_model, tmp_path):
    path = tmp_path / "log"
    with (
        path.open("w") as log,
        serve(tiny_model, log=log, files=FILES) as server,
        contextlib.ExitStack() as sockets,
    ):
        host, port = server.url.removeprefix("http://").split(":")
        for number in range(FILES + 76):
            client = sockets.enter_context(socket.create_connection((host, int(port)), timeout=30))
            with contextlib.suppress(ConnectionError):  # those that others have displaced
                client.sendall(HALF_A_HEADER)
            if number % 50 == 0:
                with server.http() as http:
                    assert http.get("/health").status_code == 200
        with server.http() as http:
            answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
            assert answer.status_code == 200
        assert server.terminate() == 0
    lines = path.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if "Traceback" in line]
    assert sum("connection" in line for line in lines) in (1, 2)
    assert len(lines) < 20, lines
