"""Manual pages: one for every command, with every option, and nothing that roff would take for a request."""

from pathlib import Path

from typer.main import get_command
from typer.testing import CliRunner

from foreword.cli.main import app
from foreword.cli.man import _text


def options(command, path="foreword"):
    """Yield the page's name of every command, with the names of its options."""
    yield (
        path,
        {
            name
            for one in command.params
            if not getattr(one, "hidden", False)
            for name in one.opts
            if name.startswith("--")
        },
    )
    for name, one in getattr(command, "commands", {}).items():
        yield from options(one, f"{path}-{name}")


def test_every_command_has_a_page_with_its_options(tmp_path: Path):
    result = CliRunner().invoke(app, ["man", str(tmp_path / "man1")])
    assert result.exit_code == 0, result.output
    commands = dict(options(get_command(app)))
    pages = {file.stem: file.read_text(encoding="utf-8") for file in (tmp_path / "man1").iterdir()}
    assert pages.keys() == commands.keys()
    assert {"foreword-run", "foreword-bench-step"} <= pages.keys()
    for name, names in commands.items():
        for option in names - {"--help"}:
            assert option.replace("-", "\\-") in pages[name], (name, option)
        requests = {line.split()[0] for line in pages[name].splitlines() if line.startswith((".", "'"))}
        assert requests <= {".TH", ".SH", ".B", ".TP", ".PP"}, name


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(app, ["man", str(tmp_path / "file" / "man1")])
    assert str(result.exception).endswith("cannot be written: Not a directory")


def test_text_is_shown_as_it_is():
    assert _text("a\\b --c\n\n.gguf files") == "a\\eb \\-\\-c\n.PP\n\\&.gguf files"
