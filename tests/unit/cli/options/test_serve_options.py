import pytest

from foreword.cli.options.serve import memory_size, origins
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
