"""Options of `serve` are read before anything heavy is imported."""

import subprocess
import sys

import pytest

from foreword.backends import choice
from foreword.cli import serve_options
from foreword.cli.serve_options import checked_device, json_object, memory_size, one_of, origins
from foreword.errors import RequestError
from foreword.server import settings


def test_the_names_are_those_that_the_engine_knows():
    assert set(serve_options.DTYPES) == {"auto", *choice.DTYPES, *choice.CPU_DTYPES}
    assert serve_options.BACKENDS == choice.BACKENDS
    assert settings.ServerSettings("m").stream_pacing in settings.STREAM_PACINGS


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1000", 1000),
        ("2G", 2 << 30),
        ("512MiB", 512 << 20),
        ("1.5gb", 3 << 29),
        (" 4 K ", 4096),
        ("1t", 1 << 40),
    ],
)
def test_sizes(text, size):
    assert memory_size("--m", text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1", "0", "1X", "1e9", "G"])
def test_bad_sizes_name_the_option(text):
    with pytest.raises(RequestError, match="--m takes"):
        memory_size("--m", text)


def test_lists_and_names():
    assert origins("https://A.example/, null") == ("https://a.example", "null")
    assert origins(None) == ()
    with pytest.raises(RequestError, match="cors-origins"):
        origins("a.example")
    assert one_of("--x", "a", ("a", "b")) == "a"
    with pytest.raises(RequestError, match="--x must be a, b or c, not 'd'"):
        one_of("--x", "d", ("a", "b", "c"))
    assert checked_device("cuda:1") == "cuda:1"
    with pytest.raises(RequestError, match="device"):
        checked_device("tpu")


@pytest.mark.parametrize("text", ["{", "[]", "1", "[" * 100_000, "ngram"])
def test_what_is_no_object_is_refused(text):
    with pytest.raises(RequestError, match="--s"):
        json_object("--s", text)


REFUSE = """
import sys
from foreword.cli.main import main
sys.argv = ["foreword", "serve", *sys.argv[1:]]
try:
    main()
except SystemExit as end:
    heavy = [name for name in ("torch", "fastapi", "transformers") if name in sys.modules]
    print(end.code, heavy)
"""


@pytest.mark.parametrize(
    "options",
    [
        ["--stream-pacing", "x"],
        ["--dtype", "int7"],
        ["--device", "tpu"],
        ["--backend", "x"],
        ["--acceptance-rule", "x"],
        ["--kv-cache-memory-bytes", "x"],
        ["--speculative-config", "{"],
        ["--host", "0.0.0.0"],
        ["--host", "192.0.2.1", "--insecure"],  # not an address of this machine: as good as an occupied port
    ],
)
def test_a_bad_option_is_refused_before_anything_heavy_is_imported(options):
    run = subprocess.run(
        [sys.executable, "-c", REFUSE, *options], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout == "2 []\n"
    assert len(run.stderr.strip().splitlines()) == 1
