"""What a file of figures may hold: JSON that can be written again, and shown."""

from __future__ import annotations

import json
from typing import Any

from trtllm_kvmap.errors import FormatError


def require_plain(entry: Any, name: str) -> None:
    """Raise FormatError, which begins with ``name``, for numbers that are not finite and for text
    that is not Unicode (half of a surrogate pair): Python reads both from JSON, and neither can be
    written.
    """
    try:
        json.dumps(entry, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{name} holds a number that is not finite, or text that is not Unicode ({error}). "
            f"Give the file as trtllm-kvmap wrote it."
        ) from error
