"""`foreword doctor`: what this installation runs on."""

import os
import sys

from rich.table import Table

from foreword.cli.console import print_json, stdout
from foreword.cli.options.common import JsonOption
from foreword.cli.options.model import DEFAULT_MODEL, ModelOption


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
    from foreword.kernels.native import choose_isa, choose_threads, explain_isa, native_status
    from foreword.models.formats.checkpoint import open_checkpoint
    from foreword.models.heads.shipped import find_head
    from foreword.models.sources.builtin import cache_directory
    from foreword.models.sources.resolve import local_model

    device = pick_device("auto")
    choice, status = choose_backend("auto", "auto", device), native_status()
    path = local_model(model)
    checkpoint = None if path is None else open_checkpoint(path)
    head = states = None
    missing_model = (
        f"{model} is not here yet: `foreword pull {model}` tells whether a head was trained for it; "
    )
    if checkpoint is not None:
        head, missing_model = find_head(checkpoint, checkpoint.tokenizer()), ""
        states = state_spec(checkpoint.config, choice.torch_dtype.itemsize)
    chosen = choose_speculation("auto", is_shape_invariant(choice), head=head)
    dtype, dtype_because = str(choice.torch_dtype).removeprefix("torch."), choice.reason
    if choice.form is not None and checkpoint is not None:
        form, dtype_because = default_format(checkpoint, choose_isa(status.instruction_sets))
        dtype = form.name
    elif choice.form is not None:
        dtype, dtype_because = "int8 or stored", f"the file decides: `foreword pull {model}` tells"
    isa = choose_isa(status.instruction_sets) if status.available else "none"
    return {
        "version": __version__,
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "device": str(device),
        "backend": choice.name,
        "backend_because": choice.reason,
        "dtype": dtype,
        "dtype_because": dtype_because,
        "speculation": "off" if chosen.config is None else "+".join(chosen.config.method),
        "speculation_because": f"{missing_model}{chosen.reason}",
        "instruction_set": isa,
        "instruction_set_because": explain_isa(isa) if status.available else status.reason,
        "instruction_sets_here": ", ".join(status.instruction_sets) or "none",
        "kernel_threads": choose_threads() if status.available else 0,
        "torch_threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "models_in": str(cache_directory()),
        **({} if states is None else {"state_megabytes": round(states.bytes_per_state / 1e6, 1)}),
    }
