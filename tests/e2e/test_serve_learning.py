"""`foreword serve --learn` as a user runs it."""

from pathlib import Path

from helpers.command_line import foreword, refusal
from helpers.serve_process import serve
from helpers.waiting import wait_until


def test_a_served_text_is_kept_and_a_second_server_is_refused(tiny_model: Path, tmp_path: Path):
    folder = tmp_path / "learn"
    learn = ("--learn", "--learn-dir", str(folder), "--learn-keep-texts", "--device", "cpu")
    with serve(tiny_model, *learn, factory=None) as server, server.http() as http:
        body = {"prompt": "hello", "max_tokens": 24, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert (folder / "policy.json").exists()
        second = foreword("serve", str(tiny_model), "--port", "0", *learn)
        assert second.returncode == 2 and second.stdout == ""
        line = second.stderr.strip().splitlines()[-1]
        assert line == f"foreword: another server learns in {folder}; stop it or give another --learn-dir"
        assert server.terminate() == 0
    wait_until((folder / "texts/-/shard-00000.safetensors").exists)
    assert folder.stat().st_mode & 0o077 == 0
    assert not (folder / "versions").joinpath("1").exists()


def test_a_backend_without_speculation_cannot_learn(tiny_model: Path):
    run = refusal("serve", str(tiny_model), "--port", "0", "--learn", "--backend", "torch")
    assert run.returncode == 2
    assert "--learn needs speculative decoding: this backend's numbers" in run.stderr
