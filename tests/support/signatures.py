"""Published signatures of packages that are not here, written as their parameters."""

from __future__ import annotations

import inspect


def signature(text: str) -> inspect.Signature:
    """Parameters in words: ``name``, ``name=default``, and ``*``, behind which they are keywords."""
    kind, made = inspect.Parameter.POSITIONAL_OR_KEYWORD, []
    for word in text.split():
        if word == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
            continue
        name, has_default, _ = word.partition("=")
        default = None if has_default else inspect.Parameter.empty
        made.append(inspect.Parameter(name, kind, default=default))
    return inspect.Signature(made)
