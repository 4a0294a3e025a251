"""What is said of draft nodes is refused before a model is loaded."""

from pathlib import Path
from typing import Any

import pytest

from foreword.cli.options.nodes import NodeOptions, with_nodes
from foreword.cli.serve import serve
from foreword.drafters.config import SpeculationConfig
from foreword.errors import RequestError

FAR = "192.0.2.1:8400"


@pytest.fixture(autouse=True)
def without_token(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FOREWORD_CLUSTER_TOKEN", raising=False)


def options(drafters: str, **given: Any) -> dict[str, Any]:
    named = {name if name == "local_tenants" else f"drafters_{name}": value for name, value in given.items()}
    return NodeOptions(drafters, **named).settings()


def test_addresses_beyond_this_machine_are_refused_before_the_model_is_looked_for(tmp_path: Path):
    with pytest.raises(RequestError, match="a cluster token"):
        serve(model="/no/such/model", port=0, drafters=FAR)
    listed = tmp_path / "nodes"
    listed.write_text(f"127.0.0.1:1\n{FAR}\n")
    with pytest.raises(RequestError, match="a cluster token"):
        options(f"@{listed}")
    with pytest.raises(RequestError, match="a cluster token"):
        with_nodes(SpeculationConfig.parse({"method": "remote", "drafters": FAR}), {})


def test_those_of_this_machine_and_insecure_ones_are_not(tmp_path: Path):
    assert options("127.0.0.1:1,unix:/run/d")["drafters"] == "127.0.0.1:1,unix:/run/d"
    assert options(FAR, insecure=True)["insecure"] is True
    given = options("127.0.0.1:1", labels="host=a")
    config = with_nodes(SpeculationConfig.parse({"method": "ngram"}), given)
    assert config is not None
    assert config.method == ("remote", "ngram")


@pytest.mark.parametrize(
    ("drafters", "given", "why"),
    [
        ("nowhere", {}, "HOST:PORT"),
        (" ,", {}, "at least one draft node"),
        ("@/no/such/list", {}, "cannot be read"),
        ("127.0.0.1:1", {"labels": "colour=red"}, "labels are host="),
        ("127.0.0.1:1", {"token_file": Path("/no/such/token")}, "token cannot be read"),
        ("127.0.0.1:1", {"tls": "a,b"}, "three files"),
        ("127.0.0.1:1", {"tls": "/a,/b,/c"}, "no file '/a'"),
    ],
)
def test_what_is_wrong_is_refused_by_name(drafters: str, given: dict[str, Any], why: str):
    with pytest.raises(RequestError, match=why):
        options(drafters, **given)
