"""`foreword bench link` and `foreword bench pools`: latency and gain of draft nodes."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from foreword.bench.skeleton import check_least
from foreword.cli.bench.common import BATCH_SIZES, Benchmark
from foreword.cli.console import fetched, load_llm, print_table, say, stage_bar
from foreword.cli.options.common import JsonCommand, parse_sizes, split_list
from foreword.cli.options.grouped import flag, late, option
from foreword.cli.options.model import DEFAULT_MODEL, ModelOption
from foreword.cli.options.nodes import SecurityOptions
from foreword.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Link(SecurityOptions, JsonCommand):
    """Measure round trip and level time of a draft node, host time per pass, and the break-even distance.

    The target is simulated: it sends draft requests --pass-ms apart. --model gives the tokenizer.
    """

    model: ModelOption = late(DEFAULT_MODEL, -1)
    drafters: str | None = option(None, "Draft node. Default: start one here.", metavar="HOST:PORT")
    method: str = option("draft_model", "Drafter of the node that is started here.")
    batch: str = option("1,16", BATCH_SIZES)
    passes: int = option(200, "Passes of each batch size.", min=10)
    pass_ms: float = option(15.0, "Milliseconds of a target pass.", min=0.1)
    acceptance: float = option(0.8, "Acceptance rate per draft token.", min=0, max=1)
    levels: int = option(5, "Levels of a draft.", min=1, max=64)
    insecure: bool = flag("Connect to a node on another machine without token and TLS.")

    def run(self) -> None:
        from foreword.cluster.settings import RemoteConfig, need_frames

        need_frames()
        from foreword.bench.link import measure_link
        from foreword.bench.pools import local_node
        from foreword.cluster.address import NodeAddress
        from foreword.cluster.framing import ChannelError
        from foreword.cluster.handshake import PeerIdentity, TokenIds
        from foreword.models.formats.checkpoint import open_checkpoint

        sizes, security = parse_sizes("--batch", self.batch), self.security()
        check_least(1, batch=min(sizes))
        given = None if self.drafters is None else NodeAddress.parse(self.drafters)
        if given is not None:
            security.check(given, self.insecure)
        path = fetched(self.model)
        tokenizer = open_checkpoint(path).tokenizer()
        bytes_of = partial(tokenizer.token_bytes, skip_special_tokens=False)
        identity = PeerIdentity(security, TokenIds(tokenizer.vocab_size, bytes_of))
        protection = {"--token-file": self.token_file, "--tls": self.tls}
        options = [part for name, value in protection.items() if value for part in (name, str(value))]
        node = local_node(str(path), self.method, options=options) if given is None else nullcontext(given)
        with node as address:
            config = RemoteConfig(str(address), shadow=0)
            try:
                report = measure_link(address, identity, config, sizes, self.passes, self.pass_ms / 1e3)
            except (OSError, ChannelError) as error:
                reason = getattr(error, "strerror", None) or error
                raise RequestError(f"draft node {address}: {reason}") from error
        farthest = report.break_even_ms(self.acceptance, self.levels, self.pass_ms)
        self.show_json(asdict(report) | {"break_even_ms": farthest})
        print_table(report.costs)
        say(f"round trip {report.round_trip_ms:.3f} ms, p99 {report.round_trip_p99_ms:.3f} ms")
        if farthest is None:
            say(
                f"no level of this node arrived before a pass of {self.pass_ms:g} ms started: there is no break-even "
                "distance; try longer passes (--pass-ms) or a faster drafter"
            )
        else:
            say(
                f"break-even distance {max(farthest, 0):.1f} ms: {self.levels} levels at acceptance "
                f"{self.acceptance:g}, passes of {self.pass_ms:g} ms, one request"
            )


@dataclass(frozen=True, kw_only=True)
class Pools(Benchmark):
    """Compare a draft model in the target's process, on draft nodes of this machine, and plain decoding, in turns.

    Nodes are processes of their own that share the machine with the target, and its GPU where they are on it.

    Example: foreword bench pools --shape llama-8b --draft-shape llama-1b --nodes cuda --both
    """

    draft: str | None = option(None, "Draft model.")
    shape: str | None = option(None, "Shape of a pair with random weights.", metavar="NAME")
    draft_shape: str | None = option(None, "Draft model's shape. Default: 1/8 of the layers.", metavar="NAME")
    agreement: float | None = option(None, "Acceptance rate of a --draft-shape. Default: 0.8.", min=0, max=1)
    nodes: str = option("auto", "Start a draft node on each device, such as cuda,cpu.", metavar="DEVICES")
    run_ahead: bool | None = option(None, "Draft while the target verifies, on shared hardware. Default: on.")
    both: bool = flag("Two nodes on each device: one that runs ahead, one that does not.")
    batches: str = option("1,8", BATCH_SIZES)
    tokens: int = option(48, "Mean number of tokens per request.", min=2)
    guesses: int = option(4, "Draft tokens per pass.", min=1, max=32)
    repeats: int = option(3, "Runs of each setting, in turns; medians are reported.", min=1)
    gpu_memory_utilization: float = option(0.6, "Fraction of GPU memory for the target, not the nodes.")

    def _check(self) -> None:
        has_model = self.draft is not None or self.model != DEFAULT_MODEL
        if self.shape is not None and has_model:
            raise RequestError("--shape makes a target and a draft; leave out --model and --draft")
        if self.shape is None and (self.draft_shape is not None or self.agreement is not None):
            raise RequestError("--draft-shape and --agreement are for random weights: give --shape too")
        if self.agreement is not None and self.draft_shape is None:
            raise RequestError("--agreement is for a draft of its own shape: give --draft-shape too")
        if self.both and self.run_ahead is not None:
            raise RequestError("--both measures with and without running ahead; leave out --run-ahead")
        if self.shape is None and self.draft is None:
            raise RequestError("--draft must name the draft model, or --shape a pair with random weights")

    def run(self) -> None:
        from foreword.cluster.settings import need_frames

        need_frames()
        sizes = parse_sizes("--batches", self.batches)
        check_least(1, batches=min(sizes))
        self._check()
        from foreword.bench.pools import measure_pools, ways_of_drafting
        from foreword.bench.step_cost import random_tokens
        from foreword.engine.config import EngineConfig

        config = EngineConfig(gpu_memory_utilization=self.gpu_memory_utilization)
        run_ahead = [True, False] if self.both else [self.run_ahead is not False]
        amount: dict[str, Any] = {"batches": sizes, "tokens": self.tokens, "repeats": self.repeats}
        with self._pair() as (target, draft), ExitStack() as nodes:
            llm = load_llm(target, **self.load_options, config=config)
            vocab_size = llm.engine.target.config.vocab_size
            # Prompts of different lengths, so that no two are equal.
            prompts = [random_tokens(65 + index, vocab_size)[1:] for index in range(max(sizes))]
            with stage_bar() as show:
                devices = split_list(self.nodes)
                ways = ways_of_drafting(draft, devices, self.guesses, nodes, run_ahead=run_ahead)
                rows = measure_pools(llm.engine, ways, prompts, **amount, progress=show)
            llm.close()
        self.report(rows, model=self.shape or self.model, draft=self.draft_shape or self.draft)

    @contextmanager
    def _pair(self) -> Iterator[tuple[str, str]]:
        """Yield the paths of target and draft model; those with random weights exist within the block."""
        if self.shape is None:
            assert self.draft is not None
            yield self.model, self.draft
            return
        from foreword.bench.random_models import named_shape, write_agreeing_pair, write_random_pair

        config, agreement = named_shape(self.shape), 0.8 if self.agreement is None else self.agreement
        with TemporaryDirectory() as folder:
            if self.draft_shape is None:
                pair = write_random_pair(config, max(1, len(config.layers) // 8), Path(folder))
            else:
                pair = write_agreeing_pair(config, named_shape(self.draft_shape), agreement, Path(folder))
            yield str(pair[0]), str(pair[1])
