"""`foreword train`: a head for a model, from texts that the model writes itself."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foreword.cli.console import DEFAULT_MODEL, DeviceOption, ModelOption, stdout
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.models.formats.checkpoint import Checkpoint
    from foreword.train.data import WritingReport
    from foreword.train.target import Target

app = typer.Typer(no_args_is_help=True, help="Train a head or a draft on texts that the model writes itself.")

PromptsOption = Annotated[
    list[Path] | None, typer.Option(help="JSON lines with prompts to answer besides self-written ones.")
]
CompileOption = Annotated[bool, typer.Option(help="Compile the parts of a pass (a GPU's compilers needed).")]


@app.command()
def data(
    out: Annotated[Path, typer.Argument(help="Directory of the shards; more are added to what is there.")],
    model: ModelOption = DEFAULT_MODEL,
    prompts: PromptsOption = None,
    minutes: Annotated[float | None, typer.Option(help="Write this long.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Write this many answer tokens.")] = None,
    rows: Annotated[int, typer.Option(help="Texts at a time.")] = 2048,
    context: Annotated[int, typer.Option(help="Longest prompt and answer together.")] = 1280,
    seed: Annotated[int, typer.Option(help="Another seed, other texts.")] = 0,
    show: Annotated[int | None, typer.Option(help="Write nothing; print this many of the texts.")] = None,
    compiled: CompileOption = True,
    device: DeviceOption = "auto",
) -> None:
    """Let a model write its own training texts.

    Example: foreword train data texts --minutes 2
    """
    from foreword.train.data import WritingSettings, write_training_set
    from foreword.train.prompts import read_prompt_file

    if show is not None:
        _show(out, model, show)
        return
    if minutes is None and tokens is None:
        raise RequestError("say how much to write: --minutes or --tokens")
    asked = [prompt.text for path in prompts or [] for prompt in read_prompt_file(path)]
    checkpoint, target = _load(model, device, compiled)
    settings = WritingSettings(rows, context, None if minutes is None else 60 * minutes, tokens, seed)
    said = time.monotonic()

    def on_progress(report: "WritingReport") -> None:
        nonlocal said
        if time.monotonic() - said > 10:
            said = time.monotonic()
            _say(_written(report))

    report = write_training_set(
        target, checkpoint.tokenizer(), out, settings, prompts=asked, on_progress=on_progress
    )
    _say(_written(report))
    _say(", ".join(f"{kind} {count / 1e6:.2f}M" for kind, count in report.kinds.most_common()))


@app.command()
def eagle3(
    out: Annotated[Path, typer.Option(help="Directory of the head.")],
    data: Annotated[
        Path, typer.Option(help="Directory of training texts, as `foreword train data` wrote them.")
    ],
    model: ModelOption = DEFAULT_MODEL,
    minutes: Annotated[float | None, typer.Option(help="Train this long.")] = None,
    steps: Annotated[int | None, typer.Option(help="Train this many steps.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the directory's last state.")] = False,
    final: Annotated[bool, typer.Option(help="End with a decay of the learning rate.")] = True,
    evaluate: Annotated[
        list[Path] | None,
        typer.Option("--eval", help="JSON lines with prompts to measure on, never trained on."),
    ] = None,
    evaluate_every: Annotated[float, typer.Option(help="Seconds between two measurements.")] = 90.0,
    export: Annotated[
        Path | None, typer.Option(help="Also write the head in pieces of at most 15 MB here.")
    ] = None,
    depth: Annotated[int, typer.Option(help="Guesses of a chain.")] = 4,
    draft_vocab: Annotated[int, typer.Option(help="Tokens that the head can guess.")] = 16384,
    taps: Annotated[
        str | None, typer.Option(help="Boundaries whose states it reads, such as 2,15,27.")
    ] = None,
    intermediate: Annotated[int | None, typer.Option(help="Width of its MLP. Default: the model's.")] = None,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a step.")] = 61440,
    muon: Annotated[float, typer.Option(help="Learning rate of the matrices.")] = 0.02,
    adam: Annotated[float, typer.Option(help="Learning rate of the rest.")] = 1e-3,
    sharpness: Annotated[float, typer.Option(help="Exponent on the target's probabilities.")] = 1.0,
    decay_share: Annotated[float, typer.Option(help="Share of the stretch in which the rate decays.")] = 0.4,
    seed: Annotated[int, typer.Option(help="Seed of weights and order.")] = 0,
    compiled: CompileOption = True,
    device: DeviceOption = "auto",
) -> None:
    """Train an EAGLE-3 head.

    Example: foreword train eagle3 --data texts --out head --minutes 5
    """
    from foreword.train.export import write_pieces
    from foreword.train.optimizer import Rates
    from foreword.train.prompts import read_prompt_file
    from foreword.train.run import Eagle3Run, train_eagle3
    from foreword.train.trainer import TrainSettings

    if minutes is None and steps is None:
        raise RequestError("say how long to train: --minutes or --steps")
    evaluation = [prompt for path in evaluate or [] for prompt in read_prompt_file(path)]
    checkpoint, target = _load(model, device, compiled)
    settings = TrainSettings(
        depth=depth,
        rates=Rates(muon, adam),
        sharpness=sharpness,
        seed=seed,
        compiled=compiled and target.device.type == "cuda",
    )
    run = Eagle3Run(
        out=out,
        data=data,
        draft_vocabulary=draft_vocab,
        taps=None if taps is None else tuple(int(tap) for tap in taps.split(",")),
        intermediate=intermediate,
        batch_rows=batch_tokens,
        seconds=None if minutes is None else 60 * minutes,
        steps=steps,
        final=final,
        decay_share=decay_share,
        resume=resume,
        evaluate_every=evaluate_every,
        settings=settings,
    )
    train_eagle3(checkpoint, target, run, evaluation, _say)
    if export is not None:
        write_pieces(export, out / "model.safetensors")
        (export / "config.json").write_bytes((out / "config.json").read_bytes())


def _load(model: str, device: str, compiled: bool) -> "tuple[Checkpoint, Target]":
    import torch

    from foreword.models.formats.opening import open_checkpoint
    from foreword.models.sources.resolve import resolve_model
    from foreword.train.target import Target

    name = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = name == "cuda"
    checkpoint = open_checkpoint(resolve_model(model))
    dtype = torch.bfloat16 if on_gpu else torch.float32
    return checkpoint, Target.load(checkpoint, torch.device(name), dtype, compiled=compiled and on_gpu)


def _show(directory: Path, model: str, count: int) -> None:
    from itertools import islice

    from foreword.models.formats.opening import open_checkpoint
    from foreword.models.sources.resolve import resolve_model
    from foreword.train.documents import read_shards

    tokenizer = open_checkpoint(resolve_model(model)).tokenizer()
    for document in islice(read_shards(directory), count):
        begin = document.answer_begin
        prompt = tokenizer.decode(document.tokens[:begin].tolist(), skip_special_tokens=False)
        answer = tokenizer.decode(document.tokens[begin:].tolist(), skip_special_tokens=False)
        where = ", held out" if document.held_out else ""
        stdout.rule(f"{document.kind}, temperature {document.temperature:.2f}{where}")
        stdout.print(prompt, style="dim", markup=False, end="")
        stdout.print(answer, markup=False)


def _written(report: "WritingReport") -> str:
    seconds = max(report.seconds, 1e-9)
    return (
        f"{report.documents} texts, {report.tokens / 1e6:.2f}M tokens, {report.answer_tokens / 1e6:.2f}M in answers "
        f"in {report.seconds:.0f} s: {report.answer_tokens / seconds / 1e3:.0f}k answer tokens/s, "
        f"{report.written_tokens / seconds / 1e3:.0f}k drawn/s"
    )


def _say(line: str) -> None:
    stdout.print(line, markup=False, soft_wrap=True)
