import pytest

from foreword.cli.options import speculation_wish
from foreword.errors import RequestError


def test_the_two_options_mean_one_thing():
    assert speculation_wish(None, None) == "auto"
    assert speculation_wish("off", None) == "off"
    assert speculation_wish(None, '{"method": "ngram"}') == '{"method": "ngram"}'
    with pytest.raises(RequestError, match="give one"):
        speculation_wish("off", '{"method": "ngram"}')
    with pytest.raises(RequestError, match="auto or off"):
        speculation_wish("ngram", None)
