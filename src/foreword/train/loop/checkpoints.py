"""Training states on disk, replaced atomically."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from foreword.errors import RequestError
from foreword.train.files import write_state
from foreword.train.heads.learner import Recipe
from foreword.train.loop.trainer import Trainer
from foreword.train.passes.packing import BatchSize
from foreword.train.passes.vocabulary import HeadVocabulary

_RENAMED = {"guesses": "draft_tokens"}
"""Old keys of recipes saved by version 0.1, and their current names."""


def save_training(path: Path, trainer: Trainer, recipe: Recipe, model: str | None) -> None:
    """Save everything needed to resume exactly; `model` is the target's identity."""
    vocabulary = trainer.learner.vocabulary
    about = {
        "method": recipe.method,
        "recipe": asdict(recipe),  # type: ignore[call-overload] # recipes are dataclasses
        "vocabulary": vocabulary.token_ids,
        "coverage": vocabulary.coverage,
        "model": model,
        "size": [trainer.size.rows, trainer.size.tails],
    }
    write_state(path, about | trainer.state())


class SavedTraining:
    """A loaded training state."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path = path
        self.state = _read(path, device)

    def check(self, recipe: Recipe, model: str | None) -> None:
        """Raise `RequestError` for another target or shape."""
        if None not in (model, self.state.get("model")) and model != self.state["model"]:
            raise RequestError(
                f"{self._path} was trained for another model; resume with that one or choose another --out"
            )
        wanted = {"method": recipe.method, **asdict(recipe)}  # type: ignore[call-overload]
        kept = {_RENAMED.get(key, key): value for key, value in self.state["recipe"].items()}
        # A state of an earlier version lacks fields that were added since.
        found = {**asdict(type(recipe)()), "method": self.state["method"], **kept}  # type: ignore[call-overload]
        for key, value in wanted.items():
            if found.get(key) != value:
                raise RequestError(
                    f"{self._path} was trained with {key} {found.get(key)}, not {value}; "
                    "resume with the same options or choose another --out"
                )

    def vocabulary(self, vocab_size: int) -> HeadVocabulary:
        return HeadVocabulary.of(self.state["vocabulary"].cpu(), vocab_size, self.state["coverage"])

    @property
    def size(self) -> BatchSize:
        return BatchSize(*self.state["size"])


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    """Load tensors and plain values; nothing in the file is executed."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise RequestError(f"there is no training state {path} to resume") from None
    except Exception as error:  # torch raises various exceptions for damaged files
        raise RequestError(
            f"{path} is no training state ({type(error).__name__}); remove it and start anew"
        ) from None
    return state
