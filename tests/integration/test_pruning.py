"""A pruned copy computes what the model computes with those layers alone."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from safetensors import safe_open

from foreword import LLM, SamplingParams
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.errors import CheckpointError, RequestError, TokenizerError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.pruning import prune
from helpers.passes import all_logits
from helpers.tiny_models import make_hf_model, write_gguf

KEPT = (0, 2, 3)
TOKENS = list(range(5, 90))


def decoder(path: Path) -> TorchDecoder:
    checkpoint = open_checkpoint(path)
    return TorchDecoder(checkpoint.config, load_weights(checkpoint, torch.float32, torch.device("cpu")))


def assert_pruned(original: Path, pruned: Path) -> None:
    expected = all_logits(decoder(original).with_layers(KEPT), TOKENS)
    assert torch.equal(all_logits(decoder(pruned), TOKENS), expected)
    text = "def add(first, second): 1999"
    ours, theirs = open_checkpoint(original).tokenizer(), open_checkpoint(pruned).tokenizer()
    assert theirs.encode(text) == ours.encode(text)
    assert theirs.eos_ids == ours.eos_ids
    chat = [{"role": "user", "content": text}]
    assert theirs.encode_chat(chat) == ours.encode_chat(chat)


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("five"), num_hidden_layers=5)


@pytest.mark.parametrize(
    ("architecture", "tied", "more"),
    [
        ("llama", True, {"dtype": "bfloat16"}),
        ("llama3", False, {"max_shard_size": 100_000}),
        ("qwen2", True, {}),
        ("qwen3", False, {}),
    ],
)
def test_directories(tmp_path: Path, architecture: str, tied: bool, more: dict):
    original = make_hf_model(tmp_path / "model", architecture, tied=tied, num_hidden_layers=5, **more)
    seen: list[tuple[int, int]] = []
    assert prune(original, tmp_path / "pruned", KEPT, lambda done, total: seen.append((done, total))) == KEPT
    assert_pruned(original, tmp_path / "pruned")
    assert seen[-1][0] == seen[-1][1] == len(seen)
    config = json.loads((tmp_path / "pruned" / "config.json").read_text())
    assert len(config.get("layer_types") or KEPT) == config["num_hidden_layers"] == len(KEPT)


def test_a_directory_keeps_its_numbers_and_loads_in_transformers(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    original = make_hf_model(tmp_path / "model", "qwen3", num_hidden_layers=5)
    _to_bfloat16(original / "model.safetensors")
    prune(original, tmp_path / "pruned", KEPT)
    with safe_open(tmp_path / "pruned" / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "pruned", dtype=torch.float32).eval()
    with torch.inference_mode():
        theirs = model(torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(all_logits(decoder(tmp_path / "pruned"), TOKENS), theirs, atol=1e-4, rtol=0)


def _to_bfloat16(path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(path).items()}
    save_file(weights, path, {"format": "pt"})


@pytest.mark.parametrize("quant", ["F32", "BF16", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("architecture", ["llama", "llama3", "qwen2", "qwen3"])
def test_gguf_files(tmp_path: Path, architecture: str, quant: str):
    model = make_hf_model(tmp_path / "model", architecture, tied=architecture == "qwen3", num_hidden_layers=5)
    original = write_gguf(model, tmp_path / "model.gguf", quant)
    prune(original, tmp_path / "pruned.gguf", KEPT)
    assert_pruned(original, tmp_path / "pruned.gguf")


def test_gguf_metadata_and_blocks_are_copied_as_they_are(five_layers: Path, tmp_path: Path):
    original = write_gguf(
        five_layers, tmp_path / "model.gguf", "Q4_1", general__alignment=64, my__note="ä", my__factor=0.1
    )
    prune(original, tmp_path / "pruned.gguf", KEPT)
    old, new = gguf.GGUFReader(original), gguf.GGUFReader(tmp_path / "pruned.gguf")
    for key, field in old.fields.items():
        if key not in ("GGUF.tensor_count", "llama.block_count"):
            assert new.fields[key].types == field.types
            assert new.fields[key].contents() == field.contents()
    assert set(new.fields) == set(old.fields)
    assert new.fields["llama.block_count"].contents() == 3
    blocks = {tensor.name: tensor for tensor in old.tensors}
    for tensor in new.tensors:
        name = tensor.name
        if name.startswith("blk."):
            _, number, rest = name.split(".", 2)
            name = f"blk.{KEPT[int(number)]}.{rest}"
        assert tensor.tensor_type == blocks[name].tensor_type
        assert tensor.data.tobytes() == blocks[name].data.tobytes()
        assert tensor.data_offset % 64 == 0


def test_lists_for_every_block_are_shortened(five_layers: Path, tmp_path: Path):
    original = write_gguf(five_layers, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(original)
    writer = gguf.GGUFWriter(tmp_path / "lists.gguf", "llama")
    for key, field in reader.fields.items():
        if key == "llama.attention.head_count_kv":
            writer.add_head_count_kv([2] * 5)
        elif not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], (field.types[1:] or [None])[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    prune(tmp_path / "lists.gguf", tmp_path / "pruned.gguf", KEPT)
    assert_pruned(original, tmp_path / "pruned.gguf")
    pruned = gguf.GGUFReader(tmp_path / "pruned.gguf")
    assert pruned.fields["llama.attention.head_count_kv"].contents() == [2] * 3


def test_what_cannot_be_pruned_is_refused_and_nothing_is_left(five_layers: Path, tmp_path: Path):
    original = write_gguf(five_layers, tmp_path / "model.gguf")
    (tmp_path / "there").mkdir()
    refusals = [
        (five_layers, "new", [5], "layer 5"),
        (five_layers, "new", 6, "from 1 to 5"),
        (five_layers, "there", 2, "exists"),
        (five_layers, "new.gguf", 2, "directory"),
        (original, "new", 2, "new.gguf"),
        (original, "model.gguf", 2, "exists"),
        (original, "model.gguf/new.gguf", 2, "cannot be written"),
    ]
    for model, out, layers, words in refusals:
        with pytest.raises(RequestError, match=words):
            prune(model, tmp_path / out, layers)
    no_tokenizer = tmp_path / "mute"
    shutil.copytree(five_layers, no_tokenizer)
    (no_tokenizer / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        prune(no_tokenizer, tmp_path / "new", 2)
    with pytest.raises(CheckpointError, match="does not exist"):
        prune(tmp_path / "none.gguf", tmp_path / "new.gguf", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "mute", "there"]


def test_a_failure_while_writing_leaves_nothing(five_layers: Path, tmp_path: Path):
    def interrupt(done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    original = write_gguf(five_layers, tmp_path / "model.gguf")
    for model, out in ((five_layers, "new"), (original, "new.gguf")):
        with pytest.raises(KeyboardInterrupt):
            prune(model, tmp_path / out, 2, interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("suffix", ["", ".gguf"])
def test_a_pruned_copy_drafts_for_the_model(five_layers: Path, tmp_path: Path, suffix: str):
    original = write_gguf(five_layers, tmp_path / "model.gguf", "Q8_0") if suffix else five_layers
    prune(original, tmp_path / f"pruned{suffix}", [0, 1, 2, 4])
    llm = LLM(str(original))
    params = SamplingParams(temperature=0.4, max_tokens=40, seed=3, ignore_eos=True)
    plain = llm.generate("the sky is", params)[0]
    form = {"method": "draft_model", "model": str(tmp_path / f"pruned{suffix}"), "num_speculative_tokens": 3}
    llm.speculate({**form, "fixed": True})
    drafted = llm.generate("the sky is", params)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.timings.draft_n_accepted > 0
