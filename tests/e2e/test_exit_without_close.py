"""Programs that end without closing their engine end in peace."""

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, sys
from foreword import LLM, Engine, SamplingParams

PARAMS = SamplingParams(max_tokens=400, ignore_eos=True)
SPECULATION = {{"method": "ngram", "num_speculative_tokens": 4}}
{body}
"""

BODIES = {
    "library": "llm = LLM(sys.argv[1], speculation=SPECULATION); llm.generate('x', SamplingParams(max_tokens=5))",
    "idle engine": "engine = Engine.load(sys.argv[1], speculation=SPECULATION)",
    "busy engine": """
async def main():
    engine = Engine.load(sys.argv[1], speculation=SPECULATION)
    streams = [engine.generate("x", PARAMS, speculation=s) for s in (None, False, {"method": "suffix"})]
    for stream in streams:
        await anext(stream)
    return engine, streams

kept = asyncio.run(main())
""",
    "failing program": """
engine = Engine.load(sys.argv[1])
sys.exit(3)
""",
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_program_that_closes_nothing_exits_cleanly(kind, tiny_model):
    program = PROGRAM.format(body=BODIES[kind])
    command = [sys.executable, "-c", program, str(tiny_model)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (run.returncode, run.stderr) == (3 if kind == "failing program" else 0, "")
