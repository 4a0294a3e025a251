"""The model card: what it is, from what and how it was trained, and what it is worth."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from foreword.train.files import write_text
from foreword.train.loop.evaluate import TauReport
from foreword.train.loop.output import CARD

_NAMES = {
    "eagle3": ("An EAGLE-3 head", "eagle3"),
    "medusa": ("Medusa heads", "medusa"),
    "dflash": ("A DFlash head", "dflash"),
    "draft": ("A draft model", "draft_model"),
    "exit": ("An early exit", "layer_skip"),
}
"""By method: what was trained, and the method of speculation that runs it."""


@dataclass(frozen=True)
class Card:
    """What a card says."""

    method: str
    target: str
    command: str
    steps: int
    batch_tokens: int
    sha256: str
    data: tuple[str, ...]  # sentences
    measured: Mapping[str, TauReport]  # by set of texts


def write_card(directory: Path, card: Card) -> None:
    """README.md."""
    title, method = _NAMES[card.method]
    key = "adapter" if card.method == "exit" else "model"
    lines = [
        f"# {title} for {card.target}",
        "",
        f'Use it with `--speculation \'{{"method": "{method}", "{key}": "DIRECTORY"}}\'`. It guesses; the model '
        "decides: it cannot change a text.",
        "",
        f"- **File**: `model.safetensors`, SHA-256 `{card.sha256}`.",
        f"- **Data**: {' '.join(card.data)}",
        f"- **Training**: {card.steps:,} steps of {card.batch_tokens:,} tokens.",
        "",
        "  ```console",
        f"  $ {card.command}",
        "  ```",
        "",
    ]
    for name, report in card.measured.items():
        lines += [
            f"- **Tokens per pass**, {name}, greedy, {report.depth} guesses; the first is right in "
            f"{report.first_guess:.1%} of all places:",
            "",
            "  | kind | τ |",
            "  | --- | ---: |",
            f"  | all | {report.tau():.2f} |",
            *(f"  | {kind} | {tau:.2f} |" for kind, tau in report.by_kind().items()),
            "",
        ]
    write_text(directory / CARD, "\n".join(lines))
