"""`foreword policy` and `foreword tune`: check, explain and write policy files."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.bench.prompts import take_per_category
from foreword.cli.bench.common import MOST_TOKENS, TEMPERATURE, prompts_of
from foreword.cli.console import fields_of, print_json, say, stage_bar, stdout
from foreword.cli.options.common import JsonCommand, JsonOption, check_output, one_of, read_bytes, read_text
from foreword.cli.options.grouped import REQUIRED, argument, command, option
from foreword.cli.options.model import ModelCommand, speculation_choice
from foreword.cli.options.serve import need_server_extra
from foreword.errors import RequestError
from foreword.paths import user_path

if TYPE_CHECKING:
    from foreword.bench.methods import Method
    from foreword.control.policy_file.document import PolicyFile
    from foreword.control.policy_file.explaining import Explanation
    from foreword.engine.llm import LLM
    from foreword.server.settings import ServerSettings

app = typer.Typer(no_args_is_help=True, help="Check a policy file, and explain its effect on a request.")


@app.command()
def check(file: Annotated[Path, typer.Argument(help="Policy file.")], as_json: JsonOption = False) -> None:
    """Check a policy file. Errors and warnings name the rule. Exit code 1 if there is an error."""
    from foreword.control.policy_file.unreachable import unreachable

    policy = _read(file)
    rules = unreachable(policy)
    cohorts = [rule.name for rule in policy.cohorts]
    names = f"cohorts {', '.join(cohorts) or 'none'}; drafters {', '.join(policy.drafters) or 'none'}"
    say(f"{file} {'contradicts itself' if rules.errors else 'is well-formed'}: {names}")
    say(*(f"error: {line}" for line in rules.errors), *(f"warning: {line}" for line in rules.warnings))
    if as_json:
        print_json(
            {
                "ok": not rules.errors,
                "cohorts": cohorts,
                "drafters": list(policy.drafters),
                "rollouts": [[rule.drafter, rule.cohort] for rule in policy.rollouts],
                "errors": rules.errors,
                "warnings": rules.warnings,
            }
        )
    if rules.errors:
        raise typer.Exit(1)


@dataclass(frozen=True, kw_only=True)
class Explain(JsonCommand):
    """Show which cohort a request belongs to, which drafters may draft for it, and why."""

    request: Path = argument(REQUIRED, "Body of a request; -: standard input.", metavar="REQUEST.json")
    policy: Path = option(REQUIRED, "The policy file.", metavar="FILE")
    route: str | None = option(None, "Route of the request, such as /generate. Default: from its fields.")
    tenant: str = option("", "Tenant of the request (see `foreword policy tenant`).")
    prompt_tokens: int | None = option(None, "Prompt length in tokens. Default: an estimate.", min=1)
    adapter: str = option("", "Name of the LoRA adapter that the request uses.")
    speculation: str = option("off", "Value of the server's --speculation.", metavar="METHOD")

    def run(self) -> None:
        from foreword.control.policy_file.explaining import explain

        need_server_extra()
        from foreword.server.api.offline import ROUTES, read_offline

        rules = _read(self.policy)
        if self.route is not None:
            one_of("--route", self.route, tuple(ROUTES))
        request = read_offline(
            read_bytes(self.request),
            _settings(self.speculation),
            route=self.route,
            tenant=self.tenant,
            prompt_tokens=self.prompt_tokens,
            adapter=self.adapter,
        )
        explanation = explain(rules, request.traits, request.speculation)
        _show(explanation, request.notes)
        self.show_json({**asdict(explanation), "notes": request.notes})


app.command()(command(Explain))


def _settings(speculation: str) -> "ServerSettings":
    """Return the settings of a server with this value of --speculation."""
    from foreword.drafters.config import SpeculationConfig
    from foreword.server.settings import ServerSettings

    choice = speculation_choice(speculation, None)
    if choice == "auto":
        raise RequestError("--speculation: name a method or off; what auto is depends on the server's model")
    if choice == "off":
        return ServerSettings("")
    return ServerSettings("", speculation=SpeculationConfig.parse(choice))


@app.command()
def tenant() -> None:
    """Name the tenant that an API key, read from standard input, belongs to."""
    from foreword.server.settings import tenant_of

    key = read_text(Path("-")).strip()
    if not key:
        raise RequestError("there is no API key on standard input")
    stdout.print(tenant_of(key))


def _read(path: Path) -> "PolicyFile":
    """Read rules and drafters; imports torch only if there are drafters."""
    from foreword.control.policy_file.parsing import read_policy

    policy = read_policy(user_path(path))
    if policy.drafters or policy.overload is not None:
        from foreword.engine.policy.file import drafter_configs

        drafter_configs(policy)
    return policy


def _show(explanation: "Explanation", notes: list[str]) -> None:
    """Print the cohort of a request, why others do not match, and the drafters with their limits."""
    say(f"cohort {explanation.cohort}, counted as {explanation.label}: {explanation.reason}")
    say(*(f"  not {name}: {why}" for name, why in explanation.passed_over.items()))
    say(*(f"  {drafter}: {why}" for drafter, why in explanation.drafters.items()))
    if explanation.max_depth is not None:
        say(f"  at most {explanation.max_depth} levels of draft tokens")
    if explanation.step_limit_ms is not None:
        say(f"  drafts make no step longer than {explanation.step_limit_ms:g} ms")
    say(f"  service class: {explanation.service}, tenant's weight {explanation.weight:g}")
    say(*(f"  note: {note}" for note in notes))


@dataclass(frozen=True, kw_only=True)
class Tune(ModelCommand):
    """Measure model and drafters on your prompts, and write the recommended policy file.

    Every prompt is answered plainly and with every drafter. `foreword serve --speculation-policy FILE` uses the file.
    """

    prompts: Path | None = option(None, "JSON lines with turns and category. Default: the shipped prompts.")
    out: Path = option(Path("speculation-policy.json"), "Policy file to write.")
    methods: str | None = option(None, "Drafters: names or JSON objects. Default: all without settings.")
    limit_per_category: int = option(2, "Use the first N prompts of each category.")
    max_tokens: int = option(64, MOST_TOKENS)
    temperature: float = option(0.0, TEMPERATURE)

    def run(self) -> None:
        from foreword.bench.drafters.measure import BenchSettings, DrafterBench
        from foreword.bench.drafters.summary import drafter_table, recommend, summarise
        from foreword.bench.methods import parse_methods

        settings, out = BenchSettings(self.max_tokens, self.temperature), self.out
        settings.sampling()  # refuse invalid parameters before loading
        wanted = None if self.methods is None else parse_methods(self.methods)
        prompts = take_per_category(prompts_of(self.prompts), self.limit_per_category)
        check_output("--out", out)
        _require_own(out)
        llm = self.load()
        methods = _available(llm) if wanted is None else wanted
        with stage_bar() as show:
            rows = summarise(list(DrafterBench(llm, methods, settings).measure(prompts, (), show)))
        size = f"{len(prompts)} prompts × up to {self.max_tokens} tokens"
        stdout.print(drafter_table(rows, f"{self.model}, {size}, plain decoding = 1"))
        policy = recommend(rows, methods, _made_with(llm, self.model))
        out.write_text(json.dumps(policy, indent=2) + "\n", encoding="utf-8")
        say(f"written: {out}; use it with foreword serve --speculation-policy {out}")
        self.show_json({"policy": policy, "file": str(out), "rows": fields_of(rows)})


tune = command(Tune)


def _require_own(out: Path) -> None:
    """Raise `RequestError` if the file exists and `foreword tune` did not write it."""
    from foreword.bench.drafters.summary import WRITTEN_BY

    if not out.exists():
        return
    try:
        is_ours = json.loads(out.read_text(encoding="utf-8"))["notes"]["by"] == WRITTEN_BY
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise RequestError(f"--out {out} exists and was not written by foreword tune; name another file")


def _available(llm: "LLM") -> "list[Method]":
    """Return the drafters that need no settings and, first, the head that is shipped for the model, if there is one."""
    from foreword.bench.methods import Method, default_methods

    methods = default_methods(without="prediction")
    choice = llm.loaded.choose_speculation("auto").config
    if choice is not None and dict(choice.options).get("model"):
        head: dict[str, Any] = {"method": choice.method[0], **dict(choice.options)}
        methods.insert(0, Method("head", head | {"num_speculative_tokens": choice.num_speculative_tokens}))
    return methods


def _made_with(llm: "LLM", model: str) -> dict[str, Any]:
    """Return notes for readers of the file."""
    from foreword import __version__

    target = llm.engine.target
    points = llm.engine.situation.costs.step_table(16, 64) or []
    return {
        "model": model,
        "device": str(target.device),
        "version": __version__,
        "step_ms_by_rows": {str(n): round(1e3 * points[n], 3) for n in (1, 2, 4, 8, 16) if n < len(points)},
    }
