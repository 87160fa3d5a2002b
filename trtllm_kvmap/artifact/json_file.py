"""Reading a JSON file that a verb wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trtllm_kvmap.errors import FormatError, reason


def read_json(path: str | Path, what: str, command: str) -> Any:
    """The content of ``path``. Raises FormatError when there is none, or it is no JSON: ``what`` is
    the thing that was looked for ("a report"), ``command`` what writes one.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: deep brackets
        raise FormatError(
            f"{path} cannot be read as {what} ({reason(error)}). Give what `{command}` wrote."
        ) from error
