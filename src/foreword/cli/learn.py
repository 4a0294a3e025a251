"""`foreword learn`: the head that a server trains on its traffic."""

import os
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from foreword.cli.console import print_json, say, stdout
from foreword.cli.options.common import JsonOption
from foreword.cli.server_client import DEFAULT_URL, KeyOption, UrlOption, call_server
from foreword.control.reporting.reading import known_fields
from foreword.engine.learning import LearningReport, VersionReport
from foreword.errors import RequestError

app = typer.Typer(
    no_args_is_help=True, help="Watch and operate the training of a server's head (`foreword serve --learn`)."
)
AdminKeyOption = Annotated[
    str | None, typer.Option(help="Admin key. Default: FOREWORD_ADMIN_KEY.", show_default=False)
]
_REASONS = dict.fromkeys(  # 405: the report is hidden, and the other methods of the route exist
    (404, 405), "it does not train its head (foreword serve --learn), or hides it (--hide-speculation)"
)


def fetch_learning(url: str, api_key: str | None) -> LearningReport:
    """Return a server's report on the training of its head; raise `RequestError` on failure."""
    answer = call_server(url, "/learn", api_key, reasons=_REASONS)
    try:
        given = known_fields(LearningReport, answer)
        versions = given.get("versions", ())
        given["versions"] = tuple(VersionReport(**known_fields(VersionReport, one)) for one in versions)
        return LearningReport(**given)
    except TypeError:
        raise RequestError(f"{url} sends no report on learning; is it of the same version?") from None


def summary(report: LearningReport) -> str:
    """Return one line about a learner."""
    newest = next((one for one in report.versions if one.number == report.version), None)
    parts = [
        f"learning: {report.state}" + (f" ({report.reason})" if report.reason else ""),
        f"{report.new_tokens:,} of {report.wanted_tokens:,} new tokens",
        f"{report.texts:,} texts kept",
        "initial head in use" if report.version is None else f"version {report.version} in use",
    ]
    if newest is not None:
        parts[-1] += f", tokens per pass on held-out texts {newest.tau_before:.2f} -> {newest.tau_after:.2f}"
    return "; ".join(parts)


@app.command()
def status(url: UrlOption = DEFAULT_URL, api_key: KeyOption = None, as_json: JsonOption = False) -> None:
    """Show the training's state, the kept texts and the trained versions."""
    report = fetch_learning(url, api_key)
    busy = f"{report.busy_seconds:.0f} s of them while requests were running"
    say(
        summary(report),
        f"{report.trainings} trainings, {report.failures} failed; {report.train_seconds:.0f} s, {busy}",
    )
    if report.versions:
        stdout.print(_versions(report))
        say(*(f"version {one.number}: {one.reason}" for one in report.versions if one.reason))
    if as_json:
        print_json(asdict(report))


def _versions(report: LearningReport) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), expand=False)
    table.add_column("version", justify="right")
    table.add_column("stage")
    table.add_column("trained")
    for name in ("answer tokens", "seconds", "τ before", "τ after"):
        table.add_column(name, justify="right")
    for one in report.versions:
        table.add_row(
            str(one.number),
            one.stage,
            datetime.fromtimestamp(one.created).strftime("%Y-%m-%d %H:%M"),
            f"{one.tokens:,}",
            f"{one.train_seconds:.0f}",
            f"{one.tau_before:.2f}",
            f"{one.tau_after:.2f}",
        )
    return table


@app.command()
def rollback(
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Use the version before the one in use, and end a training or roll-out.

    The versions that are left are not used again. A server with API keys requires an admin key.
    """
    body = {"action": "rollback"}
    answer = call_server(
        url, "/learn", _admin_key(admin_key) or api_key, method="POST", body=body, reasons=_REASONS
    )
    say("requested: the engine rolls back at its next step; see foreword learn status")
    _show_json(answer, as_json)


@app.command()
def forget(
    tenant: Annotated[
        str,
        typer.Argument(
            help="Tenant from `foreword policy tenant`; me: that of --api-key; none: requests without a key."
        ),
    ],
    url: UrlOption = DEFAULT_URL,
    api_key: KeyOption = None,
    admin_key: AdminKeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a tenant's texts, and all versions that were trained on them.

    An API key deletes its own tenant; other tenants require an admin key. Example: foreword learn forget me
    """
    # An admin key has a tenant of its own, which is not the one that `me` means here.
    key = api_key if tenant == "me" else _admin_key(admin_key) or api_key
    path = f"/learn/tenants/{quote(tenant, safe='')}"
    answer = call_server(url, path, key, method="DELETE", reasons=_REASONS)
    say("requested: the engine deletes texts and versions at its next step; see foreword learn status")
    _show_json(answer, as_json)


def _admin_key(given: str | None) -> str:
    """Return the given admin key, or the first of the environment; empty: there is none."""
    return given or os.environ.get("FOREWORD_ADMIN_KEY", "").split(",")[0]


def _show_json(answer: Any, as_json: bool) -> None:  # noqa: ANN401 - any JSON
    if as_json:
        print_json(answer)
