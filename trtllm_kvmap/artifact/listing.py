"""Every file below a folder, and every folder that does not let itself be read."""

from __future__ import annotations

from typing import Any

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem


def list_files(
    files: AbstractFileSystem, root: str
) -> tuple[dict[str, Any], list[tuple[str, OSError]]]:
    """{path: what the file system says of it} below ``root``, and (folder, why) of what could not
    be read. fsspec's own ``find`` leaves such folders of a disk out without a word.
    """
    if not isinstance(files, LocalFileSystem):
        try:
            return files.find(root, detail=True), []
        except OSError as error:
            return {}, [(root, error)]
    found: dict[str, Any] = {}
    unread: list[tuple[str, OSError]] = []
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            held = files.ls(folder, detail=True)
        except FileNotFoundError:
            continue  # another process took it away
        except OSError as error:
            unread.append((folder, error))
            continue
        folders += [each["name"] for each in held if each["type"] == "directory"]
        found |= {each["name"]: each for each in held if each["type"] != "directory"}
    return found, unread
