"""Files that are whole or absent, never half: written beside their name, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from trtllm_kvmap.errors import InputError


def require_writable(path: str | Path) -> None:
    """Make the folder of ``path`` if needed. Raises InputError when no file can be written there:
    ask before long work, not after it.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {path.parent} is no folder and cannot be made one "
            f"({error.strerror}). Give another path."
        ) from error
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file to write.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written: {path.parent} allows no writing.")


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """A temporary file in the folder of ``path`` (made if needed) that takes its name on success.

    An exception inside, or a kill, leaves whatever stood at ``path`` before. Raises InputError when
    no file can be written there, a full disk included.
    """
    path = Path(path)
    require_writable(path)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        temporary.chmod(0o644)  # mkstemp makes files that only their owner may read
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} could not be written ({error}); what stood there before is as it was. Make "
            f"room, or give another path."
        ) from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path``, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
