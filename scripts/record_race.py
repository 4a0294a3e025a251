"""Records the race that the page shows before anything runs: the default model, plainly and speculatively.

    python scripts/record_race.py src/foreword/server/page/static/recorded.json

The race is run several times, and the one with the median speed-up is written.
"""

import argparse
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from statistics import median_low
from time import perf_counter
from typing import Any

from foreword import LLM, SamplingParams
from foreword.engine.messages import NewRequest
from foreword.models.sources.builtin import DEFAULT_MODEL

PROMPT = "Write a Python class for a bank account with deposit, withdraw and transfer, then use it for two accounts."
TOKENS = 96
RACES = 5


def record(llm: LLM, name: str, speculation: bool | None) -> dict[str, Any]:
    """Return one answer: its text, and of each pass the milliseconds, the accepted tokens and all committed tokens.

    Milliseconds count from the first token to the end of the pass.
    """
    engine, passes, text, began = llm.engine, [], "", None
    ids = tuple(llm.tokenizer.encode_chat([{"role": "user", "content": PROMPT}]))
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    engine.add(NewRequest(f"{name}-{perf_counter()}", ids, params, "race", speculation, progress=True))
    while engine.has_requests:
        for delta in engine.step():
            now = perf_counter()
            began = began or now  # time counts from the first token on
            text += delta.text
            end = round(1e3 * (now - began), 2)
            passes += [[end, len(draft.accepted), draft.gained] for draft in delta.drafts]
    return {"name": name, "text": text, "passes": passes}


def race(llm: LLM, drafter: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the speculative and the plain answer to the same prompt; they must have the same text."""
    drafted, plain = record(llm, drafter, None), record(llm, "plain decoding", speculation=False)
    if drafted["text"] != plain["text"]:
        raise SystemExit("the texts differ: nothing was recorded")
    return drafted, plain


def machine() -> str:
    """Return the kind of processor, the number of cores, and whether other work ran beside the race."""
    shown = subprocess.run(
        ["lscpu"], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    names = [
        line.split(":", 1)[1].strip() for line in shown.stdout.splitlines() if line.startswith("Model name:")
    ]
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    busy = ", busy with other work" if load > cores + 1 else ""
    return f"{cores} cores of {names[0] if names else 'a CPU'} ({platform.machine()}){busy}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="JSON file to write")
    out = parser.parse_args().out
    llm = LLM(DEFAULT_MODEL, device="cpu")
    config = llm.engine.drafters.default_config
    drafter = "+".join(config.method) if config is not None else "off"
    race(llm, drafter)  # warms up, and fills the prefix cache
    races = [race(llm, drafter) for _ in range(RACES)]
    ratios = [plain["passes"][-1][0] / drafted["passes"][-1][0] for drafted, plain in races]
    chosen = races[ratios.index(median_low(ratios))]
    print(f"{drafter} is {min(ratios):.2f} to {max(ratios):.2f} times as fast in {RACES} races")
    recorded = {
        "model": DEFAULT_MODEL,
        "machine": machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "prompt": PROMPT,
        "runs": chosen,
    }
    out.write_text(json.dumps(recorded, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
