"""Files that are whole or absent: what happens when the disk is full, or the folder cannot be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trtllm_kvmap.artifact.whole import write_text
from trtllm_kvmap.errors import InputError

# A process that may write at most so many bytes into a file sees what a full disk gives.
FULL = """
import resource, sys
import torch
from trtllm_kvmap.artifact.container import write_container
from trtllm_kvmap.artifact.whole import write_text
from trtllm_kvmap.errors import InputError

resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    if sys.argv[1] == "text":
        write_text(sys.argv[2], "new" * 1000)
    else:
        write_container(sys.argv[2], "kind", 1, {}, {"x": torch.zeros(1000)})
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["text", "tensors"])
def test_a_full_disk_is_a_sentence_and_what_stood_there_stays(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    done = subprocess.run(
        [sys.executable, "-c", FULL, kind, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{path} could not be written (")
    assert "File too large" in done.stdout
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_no_room_for_a_file_at_all_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(**_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_text(tmp_path / "file", "new")
    assert not list(tmp_path.iterdir())


def test_a_mistake_of_the_writer_is_not_taken_for_the_disk_s(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "file", "\ud800")
    assert not list(tmp_path.iterdir())
