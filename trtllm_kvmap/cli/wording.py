"""A library's messages in the words of a command line: its parameters as the flags they are."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from typer.models import OptionInfo


def flags_of(command: Callable[..., Any]) -> dict[str, str]:
    """The flag of each parameter of ``command`` that is an option: ``first_tokens`` is given by
    --first-tokens.
    """
    flags = {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        for option in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(option, OptionInfo):
                # Inside Annotated, typer takes what stands at the place of a default for a name.
                given = [option.default, *(option.param_decls or ())]
                usual = f"--{parameter.name.replace('_', '-')}"
                flags[parameter.name] = next(filter(_is_flag, map(str, given)), usual)
    return flags


def _is_flag(declared: str) -> bool:
    return declared.startswith("--")


def in_flags(message: str, flags: Mapping[str, str]) -> str:
    """``message`` of the library, which names its own parameters, with the ``flags`` (flags_of) by
    which a user gave them.

    A name of several words (``first_tokens``) is a parameter wherever it stands apart. One word
    (``k``, ``layers``) may be English: it is one before "=", before "must" where the message
    begins, and in the hint "(another seed or skip)".
    """
    if not flags:
        return message

    def any_of(names: list[str]) -> str:
        # Not in paths, quotes, or longer names; longest first, since one may begin another.
        alternatives = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
        return rf"""(?<![\w./'"`-])({alternatives})(?![\w/'"`]|[.-]\w)"""

    def flag(found: re.Match[str]) -> str:
        return flags[found[1]]

    def given(found: re.Match[str]) -> str:
        return flags[found[1]] + ("" if found[2] == "True" else f" {found[2]}")

    every = any_of(list(flags))
    message = re.sub(rf"{every}=(\w+)", given, message)
    if named := re.match(rf"{every}(?:(?:, | and ){every})*(?= must )", message):
        message = re.sub(every, flag, named[0]) + message[named.end() :]
    hint = rf"(?<=\(another ){every}(?: or {every})*(?=\))"
    message = re.sub(hint, lambda found: re.sub(every, flag, found[0]), message)
    several = [name for name in flags if "_" in name]
    return re.sub(any_of(several), flag, message) if several else message
