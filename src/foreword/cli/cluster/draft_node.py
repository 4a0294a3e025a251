"""`foreword draft-node`: draft for targets on this machine or others."""

import json
import logging
from dataclasses import dataclass
from functools import partial
from typing import Any

from foreword.cli.console import DEFAULT_MODEL, ModelOption, PlaceOptions, stage_bar, stderr, stdout
from foreword.cli.options.cluster import SecurityOptions, labels_option
from foreword.cli.options.common import json_object
from foreword.cli.options.grouped import Command, command, flag, late, option


@dataclass(frozen=True, kw_only=True)
class DraftNode(SecurityOptions, PlaceOptions, Command):
    """Serve drafts to targets, which use `foreword serve --drafters HOST:PORT`. A node cannot change a text.

    Example: foreword draft-node --model smollm2-135m --listen 127.0.0.1:8400
    """

    model: ModelOption = late(DEFAULT_MODEL, -1)
    method: str = option(
        "draft_model",
        "Drafter: draft_model (--model itself), layer_skip, suffix, or several as suffix+ngram.",
    )
    options: str | None = option(
        None, 'Settings of the drafter as a JSON object: {"tree_width": 3}.', metavar="JSON"
    )
    listen: str = option(
        "127.0.0.1:8400", "Address to listen on, or unix:/PATH; port 0: any.", metavar="HOST:PORT"
    )
    capacity: int = option(256, "Most concurrent requests of all targets.", min=1)
    kv_tokens: int = option(32_768, "Size of a draft model's KV cache in tokens, over all requests.", min=16)
    run_ahead: bool = option(True, "Draft on while a target verifies; no gain for fast, near nodes.")
    labels: str = labels_option()
    insecure: bool = flag("Listen beyond this machine without token and TLS.")
    drain_seconds: float = option(10.0, "Seconds that SIGTERM waits until targets use other nodes.", min=0)

    def run(self) -> None:
        from foreword.cluster.settings import need_frames, parse_labels

        need_frames()
        from foreword.cluster.address import NodeAddress
        from foreword.cluster.pools.running import Stopping
        from foreword.drafters.config import SpeculationConfig
        from foreword.drafters.registry import drafter_kinds
        from foreword.engine.loader import load_model
        from foreword.wire.draft_node import NodeSettings, check_methods, make_node

        address, security = NodeAddress.parse(self.listen), self.security()
        security.check(address, self.insecure)
        settings: dict[str, Any] = {} if self.options is None else json_object("--options", self.options)
        names = self.method.split("+")
        check_methods(names)  # before loading a model
        given = {"method": names, **settings}
        kinds = drafter_kinds()
        if any(name in kinds and kinds[name].build_on_node is not None for name in names):
            given["model"] = self.model
        config = SpeculationConfig.parse(json.dumps(given))
        where = NodeSettings(
            address, security, self.capacity, self.kv_tokens, self.run_ahead, parse_labels(self.labels)
        )
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        stderr.print(f"[dim]loading {self.model} ...[/dim]")
        with stage_bar() as on_stage:
            loaded = load_model(self.model, **self.place, progress=partial(on_stage, "loading"))
        node = make_node(loaded, config, where)
        stopping = Stopping().listen()
        node.start()
        stdout.print(f"{self.method} of {self.model} drafts on {node.address}", soft_wrap=True, markup=False)
        stopping.wait()
        node.drain(self.drain_seconds)
        node.close()


draft_node = command(DraftNode)
