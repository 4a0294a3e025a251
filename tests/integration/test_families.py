"""Every family equals transformers on a tiny random checkpoint in the published layout, however it is run.

Also on two ranks, each with its share.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from foreword import LLM, SamplingParams
from foreword.backends.interface import Decoder
from foreword.backends.parallel.workers import Workers
from foreword.backends.runner import ModelRunner
from foreword.backends.torch.decoder import TorchDecoder
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry, Verdict
from foreword.speculation.transaction import Transaction
from helpers.cpu import STATUS
from helpers.family_gguf import ARCHITECTURES, write_family_gguf
from helpers.passes import all_logits, compute, fragmented_cache, make_request, states_for, torch_decoder
from helpers.ranks import PlantedError, fail_once, on_ranks, start_ranks
from helpers.tiny_families import FAMILIES, YARN, make_family
from helpers.trees import random_tokens, random_tree, root_path


@dataclass(frozen=True)
class Family:
    """A family's decoder here, and in transformers."""

    path: Path
    decoder: TorchDecoder
    theirs: torch.nn.Module

    @property
    def padded(self) -> TorchDecoder:
        """The same with sizes rounded up, as on a GPU."""
        return TorchDecoder(self.decoder.config, self.decoder.weights, bucketed=True)

    @torch.inference_mode()
    def expected(self, ids: list[int]) -> torch.Tensor:
        return self.theirs(torch.tensor([ids])).logits[0]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    path, theirs = make_family(tmp_path_factory.mktemp(request.param), request.param)
    return Family(path, torch_decoder(path), theirs)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Workers]:
    workers = start_ranks()
    yield workers
    workers.close()


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


def test_logits_equal_transformers(family: Family):
    ids = random_tokens(random.Random(3), 60)
    assert_equal(all_logits(family.decoder, ids), family.expected(ids))


def test_chunks_trees_and_what_was_committed_of_them(family: Family):
    check_chunks_and_trees(family, family.padded)


def test_two_ranks_together_and_after_one_has_failed(family: Family, two_ranks: Workers):
    ids = random_tokens(random.Random(3), 60)
    decoder = on_ranks(family.path, two_ranks)
    check_chunks_and_trees(family, decoder)
    fail_once(decoder, layer=0)
    with pytest.raises(PlantedError):
        all_logits(decoder, ids)
    assert_equal(all_logits(decoder, ids), all_logits(family.decoder, ids))


def check_chunks_and_trees(family: Family, decoder: Decoder) -> None:
    rng = random.Random(4)
    prompt = random_tokens(rng, 45)
    runner, cache = fragmented_cache(decoder, 8, seed=4)
    request = make_request(cache, prompt)
    for rows in (17, 1, 26):
        compute(runner, cache, request, rows)
    draft = random_tree(rng, 24, len(prompt))
    paths = [root_path(draft, node) for node in range(24)]
    longest = max(paths, key=len)
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        logits = runner.forward(transaction.batch([draft])).logits
        accepted = tuple(draft.tokens[node] for node in longest)
        transaction.commit([Verdict(tuple(longest), (*accepted, 11))])
    for node in (longest[-1], longest[0], 23, 12):
        alone = family.expected(prompt + [draft.tokens[step] for step in paths[node]])[-1]
        assert_equal(logits[1 + node], alone)
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        after = runner.forward(transaction.batch([Draft()])).logits[0]
    assert_equal(after, family.expected(request.tokens)[-1])


def test_a_prefix_that_was_found_is_as_good_as_one_that_was_computed(family: Family):
    prompt = random_tokens(random.Random(5), 40)
    states = states_for(family.decoder, 2)
    cache = PagedCache(8, prefix_caching=True, states=states)
    runner = ModelRunner.allocate(family.decoder, 8, cache.page_size, states=states)
    compute(runner, cache, make_request(cache, prompt[:36]), 36)
    second = make_request(cache, prompt)
    cache.close(second.kv)
    second.kv = cache.open(tokens=prompt)
    assert second.kv.computed == 32
    with Transaction(cache, [PassEntry.of(second, 8)]) as transaction:
        logits = runner.forward(transaction.batch([Draft()])).logits[-1]
    assert_equal(logits, family.expected(prompt)[-1])


AS_GGUF = {
    "gemma2": {"query_pre_attn_scalar": 24, "tie_word_embeddings": True},
    "gemma3": {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": None},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layer_interval": 4},
    "qwen2_moe": {"mlp_only_layers": []},
    "glm4_moe": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    },
    "deepseek_v3": {"rope_parameters": YARN | {"mscale": 0.9, "mscale_all_dim": 0.9}},
    "lfm2": {"block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
}
"""What GGUF does not say, as llama.cpp takes it."""


@pytest.mark.parametrize("name", [*ARCHITECTURES, "deepseek_v2, whole", "deepseek_v3, whole"])
def test_a_gguf_file_gives_the_same_logits(tmp_path: Path, name: str):
    """Latent attention whole, too: as files have it from before llama.cpp split it."""
    name, _, whole = name.partition(", ")
    directory, theirs = make_family(tmp_path / "hf", name, **AS_GGUF.get(name, {}))
    path = write_family_gguf(name, directory, tmp_path / "model.gguf", split=not whole)
    ids = random_tokens(random.Random(6), 40)
    decoder = torch_decoder(path)
    assert decoder.config.architecture == torch_decoder(directory).config.architecture
    assert_equal(all_logits(decoder, ids), Family(path, decoder, theirs).expected(ids))


def test_experts_in_mxfp4_are_the_same_numbers_in_gguf_and_unpacked(tmp_path: Path):
    directory, theirs = make_family(tmp_path / "hf", "gpt_oss", intermediate_size=64)
    path = write_family_gguf("gpt_oss", directory, tmp_path / "model.gguf", experts="MXFP4")
    decoder = torch_decoder(path)
    for layer, experts in enumerate(weights.experts for weights in decoder.weights.layers):
        assert experts is not None
        held = theirs.get_submodule(f"model.layers.{layer}.mlp.experts")
        gate, up = experts.gate_up.chunk(2, dim=1)
        with torch.no_grad():
            held.gate_up_proj.copy_(torch.stack((gate, up), dim=2).flatten(1, 2).transpose(1, 2))
            held.down_proj.copy_(experts.down.transpose(1, 2))
        assert len(experts.down.abs().unique()) < 200, "8 numbers in few scales"
    ids = random_tokens(random.Random(6), 40)
    assert_equal(all_logits(decoder, ids), Family(path, decoder, theirs).expected(ids))


@pytest.mark.parametrize(
    ("name", "backend"), [("gemma3", "cpu"), ("mixtral", "cpu"), ("gpt_oss", "cpu"), ("deepseek_v3", "cpu")]
)
def test_an_engine_guesses_and_writes_the_same_text(tmp_path: Path, name: str, backend: str):
    """On the backend that `auto` finds for it."""
    if backend == "cpu" and not STATUS.available:
        pytest.skip("no CPU kernels")
    directory, _ = make_family(tmp_path, name, max_position_embeddings=512)
    llm = LLM(
        str(directory), device="cpu", speculation={"method": "ngram", "prompt_lookup_min": 1, "fixed": True}
    )
    assert isinstance(llm.engine.target, TorchDecoder) == (backend == "torch")
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    prompt = "she sells sea shells by the sea shore; the shells she sells are sea shells"
    guessed, plain = (
        llm.generate([prompt], params, speculation=setting)[0].outputs[0] for setting in (None, False)
    )
    assert guessed.token_ids == plain.token_ids
    assert guessed.stats is not None
    assert guessed.stats.drafted > 0
