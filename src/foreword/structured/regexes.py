"""Guided regular expressions: their size, and their ASCII classes."""

import re

_UNICODE = "(?u)"

_ASCII = {
    "d": "[0-9]",
    "D": "[^0-9]",
    "w": "[0-9A-Za-z_]",
    "W": "[^0-9A-Za-z_]",
    "s": r"[ \t\n\r\f\v]",
    "S": r"[^ \t\n\r\f\v]",
}

_ESCAPED = re.compile(r"\\(?:[xuU]\{[^}]*\}|[pP]\{[^}]*\}|.)", re.DOTALL)
_COUNT = re.compile(r"\{\s*(\d+)\s*(?:,\s*(\d*)\s*)?\}")


def with_ascii_classes(regex: str) -> str:
    r"""Return the expression with \d, \w and \s as ASCII classes; one that begins with (?u) stays as it is.

    The replacement is a class in brackets, which stands for the same inside another class.
    """
    if regex.startswith(_UNICODE):
        return regex
    return _ESCAPED.sub(lambda found: _ASCII.get(found[0][1:], found[0]), regex)


def repeated(count: "re.Match[str]") -> int:
    """Return the copies that a counted repetition such as {2,5} stands for."""
    low, high = count[1], count[2]
    digits = (high or low).lstrip("0") or "0"
    return int(digits) if len(digits) < 12 else 10**12


def expanded_size(regex: str) -> int:
    """Return the number of characters and classes of the expression with its counted repetitions written out."""
    sums, last = [0], 0  # of the open groups; size of what a repetition that comes next would repeat
    place = 0
    while place < len(regex):
        character = regex[place]
        if character == "(":
            sums.append(0)
            last = 0
        elif character == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif character == "{" and (count := _COUNT.match(regex, place)):
            more = last * (max(repeated(count), 1) - 1)
            sums[-1], last = sums[-1] + more, last + more
            place = count.end()
            continue
        elif character not in "*+?|":
            place, last = _end_of_atom(regex, place), 1
            sums[-1] += 1
            continue
        place += 1
    return sum(sums)


def _end_of_atom(regex: str, place: int) -> int:
    """Return where the character, escape or class that begins here ends; classes may contain others."""
    depth = 0
    while place < len(regex):
        found = _ESCAPED.match(regex, place)
        if found is not None:
            place = found.end()
        elif regex[place] == "[":
            depth += 1
            place += 2 if regex.startswith("[^", place) else 1
            place += regex.startswith("]", place)
        else:
            depth -= depth > 0 and regex[place] == "]"
            place += 1
        if not depth:
            break
    return place
