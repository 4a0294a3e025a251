"""Contents of the policy file: the version in use and the candidate, each with a roll-out."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from foreword.control.policy_file.document import OTHER
from foreword.control.policy_file.parsing import VERSION
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import drafter_kinds
from foreword.engine.drafting.default_speculation import LOOKUP, WITH_A_HEAD
from foreword.learn.settings import LearnSettings
from foreword.train.files import write_text

METHOD = "eagle3"


def drafter_name(number: int) -> str:
    """Return the name of a version in the policy file."""
    return f"learned-{number}"


def drafter_with(default: SpeculationConfig | None, head: Path) -> dict[str, Any]:
    """Return the default speculation setting with another head; `auto`'s setting if no such head is part of it."""
    if default is not None and METHOD in default.method:
        others = [drafter_kinds()[name].settings for name in default.method if name != METHOD]
        if not any(field.name == "model" for settings in others for field in fields(settings)):
            return default.as_mapping() | {"model": str(head)}
    return {"method": [METHOD, LOOKUP], **WITH_A_HEAD, "model": str(head)}


def policy_document(
    drafters: Mapping[str, Mapping[str, Any]], starts: Mapping[str, str], settings: LearnSettings
) -> dict[str, Any]:
    """Return a policy file with these drafters by name; `starts` has the first stage of each roll-out."""
    rollouts = [
        {
            "pair": [name, OTHER],
            "start": starts[name],
            "steps": list(settings.steps),
            "min_requests": settings.min_requests,
            "min_passes": settings.min_passes,
            "verify_samples": settings.verify_samples,
            "min_levels": settings.min_levels,
        }
        for name in drafters
    ]
    return {
        "version": VERSION,
        "drafters": {name: dict(config) for name, config in drafters.items()},
        "rollout": rollouts,
        "notes": "written by `foreword serve --learn`, which replaces changes",
    }


def write_policy(path: Path, document: Mapping[str, Any]) -> None:
    """Write the file atomically."""
    write_text(path, json.dumps(document, indent=2) + "\n")
