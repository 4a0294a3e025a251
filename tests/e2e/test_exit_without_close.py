"""Programs that end without closing their engine end in peace."""

import pytest

from helpers.cpu import needs_cpu_kernels
from helpers.warm_process import warm

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
    "drafter in the making": """
import threading
from foreword.backends.cpu.packing import MatrixPacker

pack, is_packing = MatrixPacker.matrices, threading.Event()

def pack_without_end(*arguments, **more):
    if threading.current_thread().name != "foreword-prepare":
        return pack(*arguments, **more)
    is_packing.set()
    while True:
        pack(*arguments, **more)

MatrixPacker.matrices = pack_without_end

async def main():
    engine = Engine.load(sys.argv[1], device="cpu", backend="cpu")
    stream = engine.generate("x", PARAMS, speculation={"method": "draft_model", "model": sys.argv[1]})
    answer = asyncio.ensure_future(anext(stream))
    await asyncio.to_thread(is_packing.wait)
    answer.cancel()
    return engine, stream

kept = asyncio.run(main())
""",
    "failing program": """
engine = Engine.load(sys.argv[1])
sys.exit(3)
""",
}


NATIVE = {"drafter in the making"}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=needs_cpu_kernels if kind in NATIVE else ()) for kind in BODIES]
)
def test_a_program_that_closes_nothing_exits_cleanly(kind, tiny_model, tmp_path):
    program = PROGRAM.format(body=BODIES[kind])
    run = warm.run([str(tiny_model)], None, 120, {"FOREWORD_CACHE": str(tmp_path)}, program)
    assert (run.returncode, run.stderr) == (3 if kind == "failing program" else 0, "")
