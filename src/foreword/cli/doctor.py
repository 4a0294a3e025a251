"""`foreword doctor`: what this installation runs on."""

import os
import sys
from typing import TYPE_CHECKING

from rich.table import Table

from foreword.cli.console import print_json, stdout
from foreword.cli.options.common import JsonOption
from foreword.cli.options.model import DEFAULT_MODEL, ModelOption

if TYPE_CHECKING:
    from foreword.models.formats.checkpoint import Checkpoint


def doctor(model: ModelOption = DEFAULT_MODEL, as_json: JsonOption = False) -> None:
    """Show the backend, data type, default drafter, instruction set and threads of this machine, and the cache."""
    findings = _findings(model)
    table = Table(show_header=False, title="foreword doctor")
    for name, value in findings.items():
        table.add_row(name.replace("_", " "), str(value))
    stdout.print(table)
    if as_json:
        print_json(findings)


def _findings(model: str) -> dict[str, object]:
    """Return all lines of the report by name; the model is read if it is on this machine."""
    import torch

    from foreword import __version__
    from foreword.backends.choice import choose_backend, pick_device
    from foreword.backends.cpu.packing import default_format
    from foreword.backends.loading import is_shape_invariant
    from foreword.backends.memory import state_spec
    from foreword.engine.drafting.default_speculation import choose_speculation
    from foreword.kernels.native import choose_isa, choose_threads, native_status
    from foreword.models.heads.shipped import find_head
    from foreword.models.sources.builtin import cache_directory

    device = pick_device("auto")
    choice, status, checkpoint = choose_backend("auto", "auto", device), native_status(), _local(model)
    head = states = None
    because = f"{model} is not here yet: `foreword pull {model}` tells whether a head was trained for it; "
    if checkpoint is not None:
        head, because = find_head(checkpoint, checkpoint.tokenizer()), ""
        states = state_spec(checkpoint.config, choice.torch_dtype.itemsize)
    chosen = choose_speculation("auto", is_shape_invariant(choice), head=head)
    numbers, numbers_because = str(choice.torch_dtype).removeprefix("torch."), choice.reason
    if choice.form is not None and checkpoint is not None:
        form, numbers_because = default_format(checkpoint, choose_isa(status.instruction_sets))
        numbers = form.name
    elif choice.form is not None:
        numbers, numbers_because = "int8 or stored", f"the file decides: `foreword pull {model}` tells"
    return {
        "version": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": str(device),
        "backend": choice.name,
        "backend_because": choice.reason,
        "dtype": numbers,
        "dtype_because": numbers_because,
        "speculation": "off" if chosen.config is None else "+".join(chosen.config.method),
        "speculation_because": f"{because}{chosen.reason}",
        "instruction_set": choose_isa(status.instruction_sets) if status.available else "none",
        "instruction_sets_here": ", ".join(status.instruction_sets) or "none",
        "kernel_threads": choose_threads() if status.available else 0,
        "torch_threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "models_in": str(cache_directory()),
        **({} if states is None else {"state_megabytes": round(states.bytes_per_state / 1e6, 1)}),
    }


def _local(model: str) -> "Checkpoint | None":
    """Return the model if it is on this machine; nothing is fetched."""
    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.models.sources.resolve import local_model

    path = local_model(model)
    return None if path is None else open_checkpoint(path)
