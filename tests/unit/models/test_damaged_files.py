"""Damaged model files: one of our errors or a readable model, never a crash or a huge allocation."""

import json
import random
import resource
import struct

import pytest
import torch

from foreword.errors import CheckpointError, ForewordError
from foreword.models.formats.checkpoint import open_checkpoint
from helpers.tiny_models import make_hf_model, write_gguf

ROUNDS = 300
MEMORY_ALLOWANCE = 2**30


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    settings = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return make_hf_model(tmp_path_factory.mktemp("damaged") / "hf", "llama", tied=False, **settings)


@pytest.fixture(scope="module")
def gguf_bytes(hf_dir):
    return write_gguf(hf_dir, hf_dir.parent / "model.gguf", "Q4_1").read_bytes()


@pytest.fixture(autouse=True)
def limited_memory():
    """An allocation that believes a lying header fails at once instead of taking the machine along."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:  # noqa: PTH123
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_ALLOWANCE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def read_everything(path):
    """Whether the model could be read; anything but our own errors goes through."""
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.tokenizer().encode("some text 123")
        for name in checkpoint.tensor_names():
            checkpoint.load(name, torch.float32)
            checkpoint.quantized(name)
    except ForewordError as error:
        assert "\n" not in str(error)
        return False
    return True


def header_length(raw):
    """Where the tensor data of a GGUF file begins, roughly: behind its last tensor name."""
    return raw.rindex(b"blk.") + 60


def test_the_undamaged_files_are_fine(tmp_path, hf_dir, gguf_bytes):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_bytes)
    assert read_everything(path)
    assert read_everything(hf_dir)


def test_truncated_gguf(tmp_path, gguf_bytes):
    path = tmp_path / "model.gguf"
    rng = random.Random(0)
    cuts = {0, 1, 4, 8, 23, 24, len(gguf_bytes) - 1, *(rng.randrange(len(gguf_bytes)) for _ in range(200))}
    cuts |= {rng.randrange(header_length(gguf_bytes)) for _ in range(200)}
    for cut in sorted(cuts):
        path.write_bytes(gguf_bytes[:cut])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


def test_flipped_bits_in_a_gguf_header(tmp_path, gguf_bytes):
    path = tmp_path / "model.gguf"
    rng = random.Random(1)
    for _ in range(ROUNDS):
        raw = bytearray(gguf_bytes)
        for _ in range(rng.choice([1, 1, 4])):
            raw[rng.randrange(header_length(gguf_bytes))] ^= 1 << rng.randrange(8)
        path.write_bytes(raw)
        read_everything(path)


def test_wild_numbers_in_a_gguf_header(tmp_path, gguf_bytes):
    path = tmp_path / "model.gguf"
    rng = random.Random(2)
    wild = [0, 1, 2**31, 2**32 - 1, 2**60, 2**63 - 1, 2**64 - 1]
    for _ in range(ROUNDS):
        raw = bytearray(gguf_bytes)
        place = rng.randrange(4, header_length(gguf_bytes))
        raw[place : place + 8] = struct.pack("<Q", rng.choice(wild))
        path.write_bytes(raw)
        read_everything(path)


@pytest.mark.parametrize(
    ("place", "words"),
    [(8, "is too large"), (16, "is too large"), (24, "is too large")],
    ids=["tensors", "metadata", "string"],
)
def test_a_lying_count_is_told(tmp_path, gguf_bytes, place, words):
    path = tmp_path / "model.gguf"
    raw = bytearray(gguf_bytes)
    raw[place : place + 8] = struct.pack("<Q", 2**60)
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(path)


def tensor_entry(raw, name):
    """Place of a tensor's first dimension in the header."""
    return raw.index(name) + len(name) + 4


def test_tensor_data_past_the_end_is_told(tmp_path, gguf_bytes):
    path = tmp_path / "model.gguf"
    raw = bytearray(gguf_bytes)
    rows = tensor_entry(raw, b"output.weight") + 8
    raw[rows : rows + 8] = struct.pack("<Q", 2**39)
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="past the end"):
        open_checkpoint(path)


def test_a_lying_offset_is_told(tmp_path, gguf_bytes):
    path = tmp_path / "model.gguf"
    raw = bytearray(gguf_bytes)
    offset = tensor_entry(raw, b"blk.1.ffn_up.weight") + 16 + 4
    raw[offset : offset + 8] = struct.pack("<Q", 64)
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="is not at the expected offset"):
        open_checkpoint(path)


@pytest.fixture
def damaged_dir(tmp_path, hf_dir):
    """A copy of the directory whose safetensors file a test may spoil."""
    for file in hf_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_truncated_safetensors(damaged_dir):
    file = damaged_dir / "model.safetensors"
    raw = file.read_bytes()
    rng = random.Random(3)
    for cut in sorted({0, 1, 7, 8, 9, len(raw) - 1, *(rng.randrange(len(raw)) for _ in range(100))}):
        file.write_bytes(raw[:cut])
        with pytest.raises(CheckpointError, match="safetensors"):
            open_checkpoint(damaged_dir)


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**40, 2**63, 2**64 - 1])
def test_a_lying_safetensors_header_length(damaged_dir, length):
    file = damaged_dir / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="safetensors"):
        open_checkpoint(damaged_dir)


def test_flipped_bits_in_a_safetensors_header(damaged_dir):
    file = damaged_dir / "model.safetensors"
    raw = file.read_bytes()
    header = 8 + struct.unpack("<Q", raw[:8])[0]
    rng = random.Random(4)
    for _ in range(ROUNDS // 2):
        spoiled = bytearray(raw)
        spoiled[rng.randrange(header)] ^= 1 << rng.randrange(8)
        file.write_bytes(spoiled)
        read_everything(damaged_dir)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
def test_flipped_bits_in_json(damaged_dir, name):
    file = damaged_dir / name
    raw = file.read_bytes()
    rng = random.Random(5)
    for _ in range(ROUNDS // 3):
        spoiled = bytearray(raw)
        spoiled[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        file.write_bytes(spoiled)
        read_everything(damaged_dir)


@pytest.mark.parametrize("value", [None, 3, "text", [], {}, -1, 1e400, True])
def test_any_value_of_any_config_key(damaged_dir, value):
    file = damaged_dir / "config.json"
    config = json.loads(file.read_text())
    for key in config:
        file.write_text(json.dumps(config | {key: value}))
        read_everything(damaged_dir)
