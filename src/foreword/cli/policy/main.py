"""`foreword policy check` and `foreword policy explain`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.console import JsonOption, print_json, stdout
from foreword.cli.options.common import json_object, read_text
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.control.policy_file.document import PolicyFile
    from foreword.control.policy_file.explaining import Explanation

app = typer.Typer(no_args_is_help=True, help="Check a policy file, and ask what it says about a request.")


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The policy file.")], as_json: JsonOption = False
) -> None:
    """Say what is wrong with a policy file, by the name of the place, or that nothing is."""
    from foreword.control.policy_file.unreachable import unreachable

    policy = _read(file)
    found: dict[str, Any] = {
        "cohorts": [rule.name for rule in policy.cohorts],
        "drafters": list(policy.drafters),
        "rollouts": [[rule.drafter, rule.cohort] for rule in policy.rollouts],
        "warnings": unreachable(policy),
    }
    named = ", ".join(found["cohorts"]) or "none"
    stdout.print(
        f"{file} is well-formed: cohorts {named}; drafters {', '.join(policy.drafters) or 'none'}",
        soft_wrap=True,
    )
    for line in found["warnings"]:
        stdout.print(f"warning: {line}", soft_wrap=True, markup=False)
    if as_json:
        print_json({"ok": True, **found})


@app.command()
def explain(
    request: Annotated[
        Path, typer.Argument(metavar="REQUEST.json", help="A request's body; -: standard input.")
    ],
    policy: Annotated[Path, typer.Option(metavar="FILE", help="The policy file.")],
    tenant: Annotated[str, typer.Option(help="Whose request it is, as the server knows it.")] = "",
    prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Length of the prompt. Default: that of its ids, or a guess.")
    ] = None,
    adapter: Annotated[str, typer.Option(help="The LoRA adapter that its model is, if it is one.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Tell which cohort a request belongs to, who may guess for it, and why."""
    from foreword.control.policy_file.explaining import explain as explained
    from foreword.control.policy_file.explaining import traits_of

    rules = _read(policy)
    body = json_object(str(request), read_text(request))
    traits, notes = traits_of(body, tenant, prompt_tokens, adapter)
    found = explained(rules, traits, body.get("speculation"))
    _show(found, notes)
    if as_json:
        print_json({**found.as_json(), "notes": notes})


@app.command()
def tenant() -> None:
    """Name the tenant that an API key, read from standard input, belongs to."""
    from foreword.server.settings import tenant_of

    key = read_text(Path("-")).strip()
    if not key:
        raise RequestError("there is no API key on standard input")
    stdout.print(tenant_of(key))


def _read(path: Path) -> "PolicyFile":
    """Rules and drafters; that brings torch along only if there are drafters."""
    from foreword.control.policy_file.parsing import read_policy

    policy = read_policy(path.expanduser())
    if policy.drafters or policy.overload is not None:
        from foreword.engine.policy.drafters import drafter_configs

        drafter_configs(policy)
    return policy


def _show(found: "Explanation", notes: list[str]) -> None:
    stdout.print(f"cohort {found.cohort}, counted as {found.label}: {found.reason}", soft_wrap=True)
    for name, why in found.passed_over.items():
        stdout.print(f"  not {name}: {why}", soft_wrap=True)
    for drafter, why in found.drafters.items():
        stdout.print(f"  {drafter}: {why}", soft_wrap=True)
    if found.max_depth is not None:
        stdout.print(f"  at most {found.max_depth} guesses behind each other")
    if found.step_limit_ms is not None:
        stdout.print(f"  guesses make no step longer than {found.step_limit_ms:g} ms")
    stdout.print(f"  service class: {found.service}, tenant's weight {found.weight:g}")
    for note in notes:
        stdout.print(f"  note: {note}", soft_wrap=True)
