"""Options are read before anything heavy is imported."""

import json
import subprocess
import sys

import pytest

from foreword.backends import choice
from foreword.cli.options import model
from foreword.cli.options.common import json_object, one_of, parse_sizes
from foreword.cli.options.model import check_device, speculation_choice
from foreword.drafters.names import method_names
from foreword.drafters.registry import drafter_kinds
from foreword.errors import RequestError
from foreword.server import settings


def test_the_names_are_those_that_the_engine_knows():
    assert method_names() == list(drafter_kinds())
    assert set(model.DTYPES) == {"auto", *choice.DTYPES, *choice.CPU_DTYPES}
    assert model.BACKENDS == choice.BACKENDS
    assert set(model.QUANTIZATIONS) == set(choice.QUANTIZATIONS)
    assert set(model.KV_DTYPES) == set(choice.KV_DTYPES)
    assert settings.ServerSettings("m").stream_pacing in settings.STREAM_PACINGS


def test_the_two_options_mean_one_thing():
    assert speculation_choice(None, None) == "auto"
    assert speculation_choice("off", None) == "off"
    assert speculation_choice(None, '{"method": "ngram"}') == '{"method": "ngram"}'
    with pytest.raises(RequestError, match="give one"):
        speculation_choice("off", '{"method": "ngram"}')
    assert speculation_choice('{"method": "ngram"}', None) == '{"method": "ngram"}'
    assert speculation_choice("ngram", None) == '{"method": "ngram"}'
    assert speculation_choice("suffix+ngram", None) == '{"method": ["suffix", "ngram"]}'
    for bad in ("on", "{", "", "ngram+", "ngram,suffix"):
        with pytest.raises(RequestError, match=r"--speculation( is|: there is no method)"):
            speculation_choice(bad, None)


def test_names():
    assert one_of("--x", "a", ("a", "b")) == "a"
    with pytest.raises(RequestError, match="--x must be a, b or c, not 'd'"):
        one_of("--x", "d", ("a", "b", "c"))
    assert check_device("cuda:1") == "cuda:1"
    with pytest.raises(RequestError, match="device"):
        check_device("tpu")


@pytest.mark.parametrize("text", ["{", "[]", "1", "[" * 100_000, "ngram"])
def test_what_is_no_object_is_refused(text: str):
    with pytest.raises(RequestError, match="--s"):
        json_object("--s", text)


REFUSED = [
    ["serve", "--stream-pacing", "x"],
    ["serve", "--dtype", "int7"],
    ["serve", "--acceptance-rule", "x"],
    ["serve", "--kv-cache-memory-bytes", "x"],
    ["serve", "--speculative-config", "{"],
    ["serve", "--host", "0.0.0.0"],
    ["serve", "--host", "192.0.2.1", "--insecure"],  # not of this machine: as an occupied port
    ["generate", "hi", "--temperature", "-1"],
    ["generate", "hi", "--device", "tpu"],
    ["generate", "hi", "--backend", "x"],
    ["generate", "hi", "--speculation", "on"],
    ["generate", "hi", "--speculative-config", "ngram"],
    ["generate", "hi", "--speculation", '{"method": "magic"}'],
    ["generate", "hi", "--speculative-config", '{"method": ["ngram", "magic"]}'],
    ["generate", "hi", "--temperature", "hot"],
    ["generate", "hi", "--no-such-option"],
    ["nonsense"],
    ["generate", "hi", "--generation-config", "vllm"],
    ["chat", "--max-tokens", "0"],
    ["chat", "--dtype", "int3"],
    ["generate", "hi", "--model", "nosuchmodel"],
    ["chat", "--model", "./no/such.gguf"],
    ["serve", "nosuchmodel"],
    ["prune", "nosuchmodel", "out.gguf", "--keep", "2"],
    ["bench", "drafters", "--model", "nosuchmodel"],
    ["bench", "step", "--plot", "no/such/directory/x.png"],
    ["bench", "serve", "--plot", "no/such/directory/x.png"],
    ["theory", "--alpha", "1.5"],
    ["theory", "--k", "x"],
    ["theory", "--step-costs", "no/such/file"],
    ["bench", "step", "--tokens", "1,x"],
    ["bench", "step", "--threads", "1,x"],
    ["bench", "batch", "--batches", "x"],
    ["bench", "overhead", "--contexts", "x"],
    ["bench", "overhead", "--batches", "x"],
    ["bench", "drafters", "--dtype", "int7"],
]

REFUSE_ALL = """
import io, json, sys
from contextlib import redirect_stderr
from foreword.cli.main import main

found = []
for arguments in json.loads(sys.argv[1]):
    sys.argv, said = ["foreword", *arguments], io.StringIO()
    try:
        with redirect_stderr(said):
            main()
    except SystemExit as end:
        heavy = [name for name in ("torch", "fastapi", "transformers") if name in sys.modules]
        found.append([end.code, heavy, said.getvalue()])
print(json.dumps(found))
"""


def test_a_bad_option_is_refused_before_anything_heavy_is_imported():
    command = [sys.executable, "-c", REFUSE_ALL, json.dumps(REFUSED)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    for arguments, (code, heavy, said) in zip(REFUSED, json.loads(run.stdout), strict=True):
        assert (code, heavy, len(said.splitlines())) == (2, [], 1), (arguments, said)


def test_sizes_below_the_least_are_refused_by_the_options_name():
    assert parse_sizes("--batches", "1,8", least=1) == [1, 8]
    with pytest.raises(RequestError, match="--batches takes numbers from 1 on"):
        parse_sizes("--batches", "8,0", least=1)
