"""The command line of a training."""

import math
from pathlib import Path

from foreword.learn.settings import LearnSettings
from foreword.learn.texts import TrainingTexts
from foreword.models.heads.opening import open_head


def train_arguments(
    texts: TrainingTexts, begin: Path | None, settings: LearnSettings, places: dict[str, object]
) -> list[str]:
    """Return the arguments of `foreword` for a training on these texts; `places` has options with paths and device."""
    is_new = begin is None
    passes = settings.first_passes if is_new else settings.tune_passes
    longest = max(len(document.tokens) for document in texts.documents)
    least, most = settings.batch_tokens
    # A text of the maximum length fits into a batch a quarter larger, whatever its share of answer tokens is.
    fitting = int(1.25 * longest)
    batch = max(min(int(passes * texts.tokens / settings.wanted_steps), most), least, fitting)
    steps = max(math.ceil(passes * texts.tokens / batch), settings.min_steps)
    muon, adam = (settings.first_muon, settings.first_adam) if is_new else (settings.muon, settings.adam)
    given = {
        **places,
        "--steps": steps,
        "--batch-tokens": batch,
        "--muon": muon,
        "--adam": adam,
        "--evaluate-every": 1e9,  # only before and after the training
    }
    words = [str(word) for pair in given.items() for word in pair]
    return ["train", "eagle3", *words, "--no-speed", *([] if begin is None else _shape(begin))]


def _shape(begin: Path) -> list[str]:
    """Return the options that make a head of the same shape as an existing one, and begin from it."""
    spec = open_head(begin).spec
    words = ["--begin", str(begin), "--intermediate", str(spec.layers[0].mlp.intermediate_size)]
    if spec.boundaries is not None:
        words += ["--taps", ",".join(map(str, spec.boundaries))]
    if spec.window is not None:
        words += ["--head-window", str(spec.window)]
    words += ["--drift-norms"] if spec.has("fc_norm.0.weight") else []
    return [*words, *([] if spec.has("lm_head.weight") else ["--no-own-output"])]
