"""Draft nodes: whatever they are, do or suffer, every answer is the one that plain decoding gives."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, SamplingParams
from foreword.cluster.handshake import PeerIdentity, TokenIds
from foreword.cluster.messages import Open
from foreword.cluster.node_service import DraftService
from foreword.cluster.remote_drafter import RemoteDrafter
from foreword.cluster.security import Security, TlsFiles
from foreword.drafters.registry import drafter_kinds
from foreword.engine.config import EngineConfig
from foreword.engine.loader import LoadedModel, load_model
from foreword.errors import RequestError
from helpers.asks import ask, text_request
from helpers.chaos_proxy import ChaosProxy
from helpers.draft_nodes import asking, remote_of, running_node, until, until_connected, wait_patiently
from helpers.drafted_answers import PROMPTS, answers, mixed_params, noisy_copy, store_of_answers
from helpers.hostile_node import HostileNode


def kind_id(form: dict[str, Any]) -> str:
    return "-".join(str(value) for value in form.values())


KINDS: list[dict[str, Any]] = [
    {"method": "draft_model"},
    {"method": "draft_model", "tree_width": 3},
    {"method": "layer_skip", "exit_layer": 1},
    {"method": "self_quantized", "bits": 4},
    {"method": "ngram", "prompt_lookup_min": 1},
    {"method": "suffix", "min_match": 1, "min_probability": 0.05},
    {"method": "rest", "min_match": 1},
    {"method": "prediction"},
    {"method": ["ngram", "draft_model"], "combine": "merge"},
]
"""All that a node may have."""

BY_DEFAULT = ("draft_model", "ngram", "suffix", "prediction")
"""The others are much like these, and take longer."""

EVERY = [
    pytest.param(form, marks=[] if form["method"] in BY_DEFAULT else [pytest.mark.slow], id=kind_id(form))
    for form in KINDS
]
FEW = [KINDS[0], KINDS[1], KINDS[5]]
"""A chain of a model, a tree of one, a tree of a lookup."""

CHAOS = {"delay": 0.1, "drop": 0.05, "double": 0.1, "reorder": 0.1, "truncate": 0.01, "corrupt": 0.01}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


def test_every_drafter_can_be_a_nodes_or_is_refused_by_name():
    named = [form["method"] for form in KINDS]
    served = {name for method in named for name in ([method] if isinstance(method, str) else method)}
    refused = {name for name, kind in drafter_kinds().items() if kind.traits.needs_target}
    assert served | refused == set(drafter_kinds())
    assert not served & refused


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu")


@pytest.fixture(scope="module")
def draft(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = noisy_copy(tiny_model, tmp_path_factory.mktemp("draft") / "model")
    return load_model(str(path), dtype="float32", device="cpu", backend="cpu")


@pytest.fixture(scope="module")
def datastore(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_of_answers(llm, tmp_path_factory.mktemp("datastore"))


PARAMS = mixed_params(len(PROMPTS), max_tokens=16)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    llm.speculate(None)
    return answers(llm, PROMPTS, PARAMS)


def told(
    form: dict[str, Any], llm: LLM, draft: LoadedModel, datastore: Path
) -> tuple[LoadedModel, dict[str, Any]]:
    """The model and the settings of a node of this kind."""
    if "draft_model" in form["method"]:
        form = {**form, "model": str(draft.checkpoint.path)}
    if "rest" in form["method"]:
        form = {**form, "datastore": str(datastore)}
    return (draft if form["method"] == "draft_model" else llm.loaded), form


def expected_by_users(form: dict[str, Any], plain: list[list[int]]) -> list[tuple[int, ...]] | None:
    return [tuple(answer) for answer in plain] if "prediction" in form["method"] else None


@pytest.mark.parametrize("form", EVERY)
def test_the_text_is_that_of_plain_decoding_and_guesses_are_accepted(
    llm: LLM,
    draft: LoadedModel,
    datastore: Path,
    plain: list[list[int]],
    form: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
):
    wait_patiently(monkeypatch)
    with running_node(*told(form, llm, draft, datastore)) as node:
        llm.speculate(asking(node.address))
        until_connected(remote_of(llm))
        expected = expected_by_users(form, plain)
        outputs = llm.generate(PROMPTS, PARAMS, prediction=expected)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert sum(output.timings.draft_n_accepted for output in outputs) > 0
        assert not remote_of(llm).fault_counts()
        until(lambda: node.sessions == 0)  # no session outlives its request
        llm.speculate(None)


@pytest.fixture
def chaotic_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_patiently(monkeypatch, seconds=0.02)


@pytest.mark.usefixtures("chaotic_waits")
@pytest.mark.parametrize("form", FEW, ids=kind_id)
def test_the_text_is_the_same_whatever_happens_to_frames(
    llm: LLM, draft: LoadedModel, datastore: Path, plain: list[list[int]], form: dict[str, Any]
):
    with running_node(*told(form, llm, draft, datastore)) as node:
        proxy = ChaosProxy(node.address, CHAOS, seed=3)
        llm.speculate(asking(proxy.address))
        until_connected(remote_of(llm))
        assert answers(llm, PROMPTS, PARAMS) == plain
        assert proxy.frames > 10
        llm.speculate(None)
        proxy.close()
        until(lambda: node.sessions == 0)


@pytest.mark.slow
@pytest.mark.usefixtures("chaotic_waits")
@pytest.mark.parametrize("fault", CHAOS)
@pytest.mark.parametrize("form", KINDS, ids=kind_id)
def test_the_text_is_the_same_under_every_fault_alone(
    llm: LLM,
    draft: LoadedModel,
    datastore: Path,
    plain: list[list[int]],
    form: dict[str, Any],
    fault: str,
):
    with running_node(*told(form, llm, draft, datastore)) as node:
        proxy = ChaosProxy(node.address, {fault: 0.05 if fault in ("truncate", "corrupt") else 0.3}, seed=1)
        llm.speculate(asking(proxy.address))
        until_connected(remote_of(llm))
        for _ in range(3):
            assert answers(llm, PROMPTS, PARAMS, expected_by_users(form, plain)) == plain
        assert proxy.done[fault] > 0
        llm.speculate(None)
        proxy.close()
        until(lambda: node.sessions == 0)


@pytest.fixture
def closing(llm: LLM) -> Iterator[None]:
    yield
    llm.speculate(None)


@pytest.mark.usefixtures("closing")
@pytest.mark.parametrize(
    "rule", ["block", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("token", "traversal"))]
)
def test_other_rules_get_chosen_tokens_and_nothing_of_their_noise(
    tiny_model: Path, draft: LoadedModel, rule: str, monkeypatch: pytest.MonkeyPatch
):
    """Greedy answers are the same under all rules; a node is told neither temperature nor noise."""
    wait_patiently(monkeypatch)
    config = EngineConfig(acceptance_rule=rule)
    other = LLM(
        str(tiny_model), dtype="float32", device="cpu", backend="cpu", speculation="off", config=config
    )
    expected = answers(other, PROMPTS[1:3], [GREEDY] * 2)
    form = {"method": "draft_model", "model": str(draft.checkpoint.path), "tree_width": 2}
    with running_node(draft, form) as node:
        other.speculate(asking(node.address))
        until_connected(remote_of(other))
        outputs = other.generate(PROMPTS[1:3], GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert sum(output.timings.draft_n_accepted for output in outputs) > 0
        other.engine.close()


@pytest.mark.usefixtures("closing")
def test_without_nodes_a_target_decodes_plainly_and_uses_them_when_they_come(
    llm: LLM, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
):
    wait_patiently(monkeypatch)
    form = {"method": "ngram", "prompt_lookup_min": 1}
    with running_node(llm.loaded, form) as node:
        address = node.address
    llm.speculate(asking(address))  # nobody listens there now
    assert answers(llm, PROMPTS, PARAMS) == plain
    with running_node(llm.loaded, form, address=address) as node:
        until_connected(remote_of(llm))
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert sum(output.timings.draft_n_accepted for output in outputs) > 0


@pytest.mark.usefixtures("closing")
def test_texts_of_local_tenants_do_not_leave_the_target(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    wait_patiently(monkeypatch)
    with running_node(llm.loaded, {"method": "ngram", "prompt_lookup_min": 1}) as node:
        llm.speculate(asking(node.address, local_tenants="bank-*,"))
        drafter = remote_of(llm)
        until_connected(drafter)
        secret = ask(text_request([5, 6] * 4, tenant="bank-7", vocab_size=300))
        open_one = ask(text_request([5, 6] * 4, tenant="shop", vocab_size=300))
        drafts = drafter.propose([secret, open_one])
        assert [len(draft) > 0 for draft in drafts] == [False, True]
        assert node.sessions == 1
        drafter.forget(open_one.request)


@pytest.mark.usefixtures("closing")
def test_a_request_that_asks_for_nodes_by_name_shares_the_engines_connection(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    wait_patiently(monkeypatch)
    with running_node(llm.loaded, {"method": "ngram", "prompt_lookup_min": 1}) as node:
        llm.speculate(asking(node.address, method=["remote", "ngram"]))
        until(lambda: [report.state == "down" for report in llm.engine.drafters.nodes()] == [False])
        with monkeypatch.context() as patched:
            patched.setattr(RemoteDrafter, "start", lambda _: pytest.fail("connected again"))
            (output,) = llm.generate([PROMPTS[1]], PARAMS[1], speculation={"method": "remote", "fixed": True})
        assert output.timings.draft_n > 0
        assert len(llm.engine.drafters.nodes()) == 1  # told once
        llm.speculate({"method": "ngram"})  # the default's use ends, the other one stays connected
        (report,) = llm.engine.drafters.nodes()
        assert report.state != "down"


def test_texts_of_classes_without_nodes_do_not_leave_the_target(
    tiny_model: Path, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened: list[Open] = []
    opens = DraftService.open
    monkeypatch.setattr(
        DraftService, "open", lambda desk, link, told: opened.append(told) or opens(desk, link, told)
    )
    rules = {
        "version": 1,
        "drafters": {"quick": {"method": "ngram"}},
        "cohorts": [{"name": "secret", "match": {"temperature": [0, 0.1]}, "drafters": ["quick"]}],
    }
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps(rules))
    config = EngineConfig(speculation_policy=str(policy))
    with running_node(llm.loaded, {"method": "ngram", "prompt_lookup_min": 1}) as node:
        own = asking(node.address)
        other = LLM(
            str(tiny_model), dtype="float32", device="cpu", backend="cpu", speculation=own, config=config
        )
        until_connected(remote_of(other))
        secret = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
        for wish in (None, {"method": "remote"}, {"num_speculative_tokens": 2}):
            other.generate(PROMPTS[0], secret, speculation=wish)
        other.generate(PROMPTS[1], SamplingParams(temperature=0.8, max_tokens=4, ignore_eos=True))
        until(lambda: bool(opened))
        other.close()
    assert len(opened) == 1  # the last one's: frames of a connection come in order


def test_addresses_beyond_this_machine_need_a_token_and_tls(llm: LLM):
    with pytest.raises(RequestError, match="cluster token"):
        llm.speculate(asking("192.0.2.1:9000"))


@pytest.mark.usefixtures("closing", "chaotic_waits")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_a_hostile_node_cannot_change_a_text(llm: LLM, plain: list[list[int]], seed: int):
    size = llm.loaded.vocab_size
    ids = TokenIds(size, lambda token: llm.tokenizer.token_bytes(token, skip_special_tokens=False))
    node = HostileNode(PeerIdentity(Security(), ids), size, seed)
    llm.speculate(asking(node.address))
    until_connected(remote_of(llm))
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [output.outputs[0].token_ids for output in outputs] == plain
    assert sum(output.timings.draft_n for output in outputs) > 0  # they were judged
    node.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Certificate, key and authority, as an operator makes them."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make certificates with")
    folder = tmp_path_factory.mktemp("tls")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]

    def make(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    make("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=cluster")
    make("req", *new_key, "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=member")
    make(
        "x509",
        "-req",
        "-in",
        "own.csr",
        "-CA",
        "ca.pem",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-out",
        "own.pem",
    )
    return str(folder / "own.pem"), str(folder / "own.key"), str(folder / "ca.pem")


@pytest.mark.usefixtures("closing")
def test_a_token_and_tls_protect_a_node(
    llm: LLM,
    plain: list[list[int]],
    certificates: tuple[str, str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    wait_patiently(monkeypatch)
    token = tmp_path / "token"
    token.write_text("a token of this cluster")
    token.chmod(0o600)
    security = Security.of(str(token), TlsFiles(*certificates))
    tls = dict(zip(("tls_certificate", "tls_key", "tls_authority"), certificates, strict=True))
    with running_node(llm.loaded, {"method": "ngram", "prompt_lookup_min": 1}, security=security) as node:
        llm.speculate(asking(node.address, token_file=str(token), **tls))
        until_connected(remote_of(llm))
        outputs = llm.generate(PROMPTS, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert sum(output.timings.draft_n_accepted for output in outputs) > 0
        other = tmp_path / "other"
        other.write_text("a token of another cluster")
        other.chmod(0o600)
        llm.speculate(asking(node.address, token_file=str(other), **tls))
        drafter = remote_of(llm)
        until(lambda: drafter.nodes()[0].reason != "not connected yet")
        assert drafter.nodes()[0].state == "down"
        assert "another cluster token" in drafter.nodes()[0].reason
        assert answers(llm, PROMPTS, PARAMS) == plain
