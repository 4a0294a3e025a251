"""Speed of writing and training with random weights in the default model's shape; no model file needed."""

import time

import numpy as np
import torch

from foreword.backends.torch.weights import DecoderWeights, LayerWeights
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec
from foreword.train.documents import make_document
from foreword.train.eagle3 import Eagle3Head, shape_for
from foreword.train.endless import EndlessBatch, Job
from foreword.train.packing import BatchSize
from foreword.train.schedule import Stretch
from foreword.train.target import Target
from foreword.train.trainer import Trainer, TrainSettings
from foreword.train.vocabulary import DraftVocabulary

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
LAYERS, HIDDEN, INNER, VOCABULARY = (
    (30, 576, 1536, 49152) if IS_GPU else (2, 576, 64, 512)
)  # small: to try it out
ROWS, BATCH, DRAFT = (2048, (61440, 20480), 16384) if IS_GPU else (4, (1024, 512), 256)
SECONDS = 8.0 if IS_GPU else 2.0
DTYPE = torch.bfloat16 if IS_GPU else torch.float32


def finish() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def memory() -> str:
    return f"{torch.cuda.max_memory_allocated() / 2**30:.0f} GiB" if IS_GPU else "no GPU"


def random_target(device: torch.device) -> Target:
    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device=device) * 0.03).to(DTYPE)

    def ones() -> torch.Tensor:
        return torch.ones(HIDDEN, device=device, dtype=DTYPE)

    spec = AttentionSpec(9, 3, 64)
    layer = LayerSpec(spec, MlpSpec(INNER))
    config = ModelConfig(
        "llama",
        VOCABULARY,
        HIDDEN,
        8192,
        (layer,) * LAYERS,
        NormSpec(1e-5),
        RopeSpec(1e5),
        tied_embeddings=True,
    )
    layers = tuple(
        LayerWeights(
            ones(), draw(960, HIDDEN), None, None, None, draw(HIDDEN, HIDDEN), None, ones(),
            draw(2 * INNER, HIDDEN), None, draw(HIDDEN, INNER), None,
        )
        for _ in range(LAYERS)
    )  # fmt: skip
    embedding = draw(VOCABULARY, HIDDEN)
    return Target(config, DecoderWeights(embedding, layers, ones(), embedding), compiled=IS_GPU)


def writing_speed(target: Target, seconds: float) -> None:
    random = np.random.default_rng(0)
    finished = 0

    def jobs():  # noqa: ANN202
        while True:
            prompt = random.integers(0, VOCABULARY, int(random.integers(20, 700))).tolist()

            def done(written: list[int]) -> None:
                nonlocal finished
                finished += 1

            yield Job(prompt, int(random.integers(30, 250)), 0.7, done)

    batch = EndlessBatch(target, rows=ROWS, context=1280 if IS_GPU else 1000, stop_ids=frozenset({2}))
    started = time.monotonic()
    begin, before = None, 0
    for _ in batch.run(jobs()):
        if begin is None:
            begin, before = time.monotonic(), batch.tokens_written
            print(f"first stretch after {begin - started:.1f} s")
        if time.monotonic() - begin > seconds:
            break
    finish()
    elapsed = time.monotonic() - begin
    print(
        f"writing: {(batch.tokens_written - before) / elapsed / 1e3:.0f}k tokens/s, {finished / elapsed:.0f} texts/s"
    )
    finish()
    start = time.monotonic()
    batch._decode()
    finish()
    print(f"one step alone: {(time.monotonic() - start) / 16 * 1e3:.2f} ms; {memory()}")


def training_speed(target: Target, seconds: float) -> None:
    random = np.random.default_rng(0)
    documents = []
    for _ in range(4000 if IS_GPU else 12):
        prompt, answer = int(random.integers(30, 600)), int(random.integers(60, 300))
        tokens = random.integers(0, DRAFT, prompt + answer).tolist()
        documents.append(make_document(tokens, [(prompt, prompt + answer)], "x", 0.0))
    head = Eagle3Head(shape_for(target, DRAFT)).to(target.device)
    vocabulary = DraftVocabulary.of(torch.arange(DRAFT), VOCABULARY, 1.0)
    head.begin_from(target, vocabulary.token_ids, 0)
    size = BatchSize(*BATCH)
    trainer = Trainer(target, head, vocabulary, documents, size, TrainSettings(compiled=IS_GPU))
    start = time.monotonic()
    trainer.train(Stretch(last_step=3))
    finish()
    print(f"three steps with compiling: {time.monotonic() - start:.1f} s")
    trainer.train(Stretch(seconds=seconds), report_every=10, on_report=print)
    batch_parts(trainer, target)
    print(memory())


def batch_parts(trainer: Trainer, target: Target) -> None:
    from foreword.train.packing import batches

    batch = next(batches(trainer._documents, trainer.size, (1,), target.device))
    for name, work in (
        (
            "target",
            lambda: target.forward(batch.token_ids, batch.positions, batch.texts, trainer.head.shape.taps),
        ),
        ("step", lambda: trainer._one(batch, 0.01)),
        ("measuring", lambda: trainer.evaluate(batch.documents)),
    ):
        work()
        finish()
        start = time.monotonic()
        for _ in range(3):
            work()
        finish()
        print(f"{name}: {(time.monotonic() - start) / 3 * 1e3:.1f} ms")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA if IS_GPU else ProfilerActivity.CPU]) as profiler:
        trainer._one(batch, 0.01)
        finish()
    print(
        profiler.key_averages().table(
            sort_by="cuda_time_total" if IS_GPU else "cpu_time_total", row_limit=18, max_name_column_width=60
        )[-6000:]
    )


def main() -> None:
    print("torch", torch.__version__)
    target = random_target(DEVICE)
    for part in (writing_speed, training_speed):
        try:
            part(target, SECONDS)
        except Exception:
            import traceback

            traceback.print_exc()


if __name__ == "__main__":
    main()
