import pytest

from foreword.cli.options.serve import (
    admin_keys,
    api_keys,
    context_words,
    memory_size,
    origins,
    positional,
    repeated,
)
from foreword.errors import RequestError


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


def test_the_ready_line_says_when_the_context_is_cut():
    assert context_words(8192, 8192, None) == "context 8,192 tokens"
    cut = context_words(18_064, 32_768, None)
    assert cut == "context 18,064 of 32,768 tokens: limited by KV memory (--kv-cache-memory-bytes)"
    assert context_words(4096, 32_768, 4096) == "context 4,096 of 32,768 tokens: --max-model-len"


def test_keys_come_from_options_or_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREWORD_API_KEY", "a, b")
    monkeypatch.setenv("FOREWORD_ADMIN_KEY", "root")
    assert api_keys(None) == ("a", "b")
    assert admin_keys(None, ("a", "b")) == ("root",)
    assert admin_keys(["other"], ("a", "b")) == ("other",)
    with pytest.raises(RequestError, match="also an API key"):
        admin_keys(["a"], ("a", "b"))
    for read, option in ((api_keys, "--api-key"), (lambda given: admin_keys(given, ()), "--admin-key")):
        with pytest.raises(RequestError, match=f"{option} is empty"):
            read([" "])


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("m --lora-modules a=x b=y --port 1", "m --lora-modules a=x --lora-modules b=y --port 1"),
        ("--lora-modules=a=x b=y m", "--lora-modules=a=x --lora-modules b=y m"),
        ("--lora-modules a=x --lora-modules b=y", "--lora-modules a=x --lora-modules b=y"),
        ("--speculation x --lora-modules a=x m c=z", "--speculation x --lora-modules a=x m c=z"),
        ("m a=x", "m a=x"),
    ],
)
def test_several_adapters_behind_one_option(given: str, read: str):
    assert repeated("--lora-modules", given.split()) == read.split()


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("--model m --port 1", "m --port 1"),
        ("--port 1 --model=m", "--port 1 m"),
        ("m --port 1", "m --port 1"),
        ("--port 1 --model", "--port 1 --model"),
    ],
)
def test_the_model_may_be_an_option_as_in_vllm(given: str, read: str):
    assert positional("--model", given.split()) == read.split()
