"""Answer several requests at once with the asynchronous engine."""

import asyncio
import sys

from foreword import Engine, SamplingParams


async def ask(engine: Engine, prompt: str) -> str:
    text = ""
    async for output in engine.generate(prompt, SamplingParams(temperature=0, max_tokens=16)):
        text = output.outputs[0].text  # the whole answer so far
    return text


async def main() -> None:
    engine = Engine.load(*sys.argv[1:2] or ["smollm2-135m"], speculation={"method": "ngram"})
    try:
        for text in await asyncio.gather(
            *(ask(engine, f"A word for {thing}:") for thing in ("rain", "sun", "wind"))
        ):
            print(text)
    finally:
        engine.close()


asyncio.run(main())
