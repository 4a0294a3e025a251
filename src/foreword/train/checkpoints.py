"""Training states on disk: the old one stays until the new one is whole."""

from pathlib import Path
from typing import Any

import torch

from foreword.errors import RequestError


def save_state(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    torch.save(state, partial)
    partial.replace(path)


def load_state(path: Path, device: torch.device) -> dict[str, Any]:
    """Tensors and plain values alone: nothing in the file is run."""
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise RequestError(f"there is no training state {path} to resume") from None
    except Exception as error:  # torch raises many kinds for damaged files
        raise RequestError(
            f"{path} is no training state ({type(error).__name__}); remove it and start anew"
        ) from None
    return state
