"""The one error that a wrong parameter, file or option raises."""

import re

LONGEST_WORD, LONGEST = 200, 1000


class TachyscopeError(Exception):
    """What was given, what is allowed, what to do; one line."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def shortened(message: str) -> str:
    """A message without the middle of what is too long in it: what was given may be megabytes."""
    words = re.sub(r"\S+", lambda word: _cut(word[0], LONGEST_WORD), message)
    return _cut(words, LONGEST)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    # the end is where an error says what to do
    return f"{text[: most * 2 // 3]}…{text[-(most // 3) :]}"
