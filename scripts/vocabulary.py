"""Keeps the field's words: fails where README, docs or source text use a word of the project's old dialect.

In Markdown, code blocks and `code spans` are skipped; in Python only comments and strings are read, since public names
stay. Run by `make lint`.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

REPLACEMENTS = {
    r"guess(es|ed|ing|er)?": "draft token, draft, speculation",
    r"told": "notified, given, reported",
    r"nobody|whoever": "no request, the drafter, the caller",
    r"behind": "after, lagging by, depends on",
    r"at large|foreknowledge": "pooled, prior",
    r"of late": "recently",
    r"in vain": "without effect",
    r"luck(y)?|unlucky": "acceptance ratio",
    r"dear(er)?": "expensive, slow",
    r"on (its|their) way|under way": "in flight",
    r"all but": "nearly, except",
    r"the law of|its law": "distribution",
}
WORDS = re.compile("|".join(rf"\b(?:{word})\b" for word in REPLACEMENTS), re.IGNORECASE)

ALLOWED = re.compile(
    r"behind (a|the) (reverse )?proxy|Dear Sir or Madam|all but (its|the) last|/guesses\b|^\"(guesses|Behind)\"$",
    re.IGNORECASE,
)  # /guesses: a command of the chat; alone: a key of saved files, a tag on the wire


def markdown_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) outside code blocks, with code spans removed."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        is_code ^= line.lstrip().startswith("```")
        if not is_code and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`|\]\([^)]*\)", "", line)


def python_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of comments and strings."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kinds:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, re.sub(r"`[^`]*`|\{[^{}]*\}", "", line)


def findings(path: Path) -> Iterator[str]:
    """Yield one line for each word that should be another."""
    read = markdown_lines if path.suffix == ".md" else python_lines
    for number, line in read(path.read_text(encoding="utf-8")):
        for match in WORDS.finditer(ALLOWED.sub("", line)):
            better = next(
                new for old, new in REPLACEMENTS.items() if re.fullmatch(old, match[0], re.IGNORECASE)
            )
            yield f'{path.relative_to(ROOT)}:{number}: "{match[0]}": write {better}'


def main() -> int:
    """Print what was found; the exit code is 1 if anything was."""
    paths = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("src/**/*.py")))
    lines = [line for path in paths for line in findings(path)]
    print("\n".join(lines) or "vocabulary: ok")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
