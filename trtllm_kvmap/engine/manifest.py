"""What a pipeline's folder says of itself, and the proof that the folder is still what it says."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.pair import Pair, pair_from_json
from trtllm_kvmap.artifact.record import spec_to_json
from trtllm_kvmap.artifact.whole import write_text
from trtllm_kvmap.engine.config import PipelineConfig
from trtllm_kvmap.errors import FormatError, InputError
from trtllm_kvmap.spec.model import ModelSpec

NAME = "pipeline.json"
KIND = "trtllm_kvmap pipeline"
FORMAT_VERSION = 1
SOURCE, TARGET = "source", "target"
MAP_ENGINE = "map.engine"
KVMAP = "map.kvmap.safetensors"
CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of the folder: its size and sha256 in hex."""

    bytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> FileRecord:
        sha = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK):
                sha.update(chunk)
        return FileRecord(path.stat().st_size, sha.hexdigest())


@dataclass(frozen=True, slots=True)
class Manifest:
    """``files`` are all files of the folder but the manifest, by path relative to it.

    ``tensorrt_llm``, ``tensorrt`` and ``device`` say what built the engines: an engine runs under
    these alone.
    """

    config: PipelineConfig
    source: ModelSpec
    target: ModelSpec
    source_fingerprint: Fingerprint
    target_fingerprint: Fingerprint
    kvmap_digest: str
    tensorrt_llm: str
    tensorrt: str
    device: str
    files: dict[str, FileRecord]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": KIND,
            "version": FORMAT_VERSION,
            "config": self.config.to_json(),
            "source": spec_to_json(self.source),
            "target": spec_to_json(self.target),
            "source_fingerprint": self.source_fingerprint.to_json(),
            "target_fingerprint": self.target_fingerprint.to_json(),
            "kvmap_digest": self.kvmap_digest,
            "tensorrt_llm": self.tensorrt_llm,
            "tensorrt": self.tensorrt,
            "device": self.device,
            "files": {name: asdict(record) for name, record in sorted(self.files.items())},
        }

    def write(self, folder: Path) -> None:
        write_text(folder / NAME, json.dumps(self.to_json(), indent=2) + "\n")


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Every file below ``folder`` but the manifest."""
    return {
        path.relative_to(folder).as_posix(): FileRecord.of(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path != folder / NAME
    }


def read_manifest(folder: str | Path) -> Manifest:
    """The manifest of ``folder``, every file of which was read and compared with it.

    Raises FormatError with one sentence for a manifest that is missing, of another version or
    incomplete, and for a file that is missing, changed, or not named in it.
    """
    folder = Path(folder)
    manifest = _parse(folder / NAME)
    there = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if not path.is_dir() and path != folder / NAME
    }
    missing, foreign = sorted(manifest.files.keys() - there), sorted(there - manifest.files.keys())
    if missing or foreign:
        what = [f"lacks {', '.join(missing)}"] if missing else []
        what += [f"holds {', '.join(foreign)}, which it did not come with"] if foreign else []
        raise FormatError(f"The pipeline {folder} {' and '.join(what)}; build it again.")
    for name, record in manifest.files.items():
        if FileRecord.of(folder / name) != record:
            raise FormatError(
                f"{folder / name} is not the file that the pipeline was built with: its size or "
                f"digest differs. Fetch or build it again."
            )
    return manifest


def _parse(path: Path) -> Manifest:
    if not path.is_file():
        raise FormatError(
            f"There is no {path}; give a folder that build_engines.py has written to its end."
        )
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise FormatError(f"{path} is damaged ({error}); build the pipeline again.") from error
    if not isinstance(entry, dict) or entry.get("kind") != KIND:
        raise FormatError(f"{path} is not the manifest of a pipeline; give a pipeline's folder.")
    if entry.get("version") != FORMAT_VERSION:
        raise FormatError(
            f"{path} has format version {entry.get('version')}; this package reads version "
            f"{FORMAT_VERSION}. Build the pipeline again with this package."
        )
    names = {field.name for field in fields(Manifest)}
    unlike = sorted((entry.keys() - {"kind", "version"}) ^ names)
    if unlike:
        raise FormatError(
            f"{path} lacks {', '.join(unlike)}, or should not have them; build the pipeline again."
        )
    try:
        return _from_entry(entry)
    except (KeyError, TypeError, ValueError, InputError, FormatError) as error:
        raise FormatError(f"{path} cannot be read ({error}); build the pipeline again.") from error


def _from_entry(entry: dict[str, Any]) -> Manifest:
    pair: Pair = pair_from_json(entry)
    words = {name: entry[name] for name in ("kvmap_digest", "tensorrt_llm", "tensorrt", "device")}
    if not all(isinstance(word, str) and word for word in words.values()):
        raise ValueError(f"{', '.join(words)} must be texts that are not empty")
    files = {name: FileRecord(**record) for name, record in entry["files"].items()}
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"the file {name} lies outside the folder")
    return Manifest(config=PipelineConfig.of(entry["config"]), **pair, **words, files=files)
