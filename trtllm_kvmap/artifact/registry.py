"""A folder of maps, on this machine or behind any fsspec URL, over many pairs and directions."""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from trtllm_kvmap.artifact.container import read_digest, read_head
from trtllm_kvmap.artifact.entry import UNPRINTABLE, Entry, Unusable, entry_from_content
from trtllm_kvmap.artifact.evidence import DIGEST, require_proven, unproven
from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.kvmap import FORMAT_VERSION, KIND, KvMap, read_map
from trtllm_kvmap.artifact.listing import list_files
from trtllm_kvmap.artifact.resident import Resident
from trtllm_kvmap.artifact.signature import SUFFIX as SIGNATURE
from trtllm_kvmap.artifact.signature import require_signature, sign
from trtllm_kvmap.errors import FormatError, InputError, KvMapError, MismatchError, UnprovenError

SUFFIX = ".kvmap.safetensors"


class Registry:
    """Maps in ``url``: a folder, or what fsspec reads (``s3://bucket/maps``, ``memory://maps``).

    Every file is one map under its own name, so writers never meet: a map appears whole or not at
    all, and a damaged file is reported and stands in nobody's way. With a ``public_key`` (ed25519,
    PEM) only maps that it signed are loaded. ``host_bytes`` bounds the maps kept in host memory
    (None: no bound), the least recently used leaves first.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        host_bytes: int | None = None,
        public_key: bytes | None = None,
    ) -> None:
        try:
            # A client that remembers listings would not see what others store meanwhile.
            self._files, self._root = fsspec.core.url_to_fs(str(url), use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise InputError(f"{url} cannot be opened as a registry: {error}.") from error
        self.url, self.public_key = str(url), public_key
        self.resident: Resident[tuple[KvMap, str | None]] = Resident(host_bytes)

    def scan(self) -> Iterator[Entry | Unusable]:
        """Every map of the registry, by path, from headers alone; a file that is none says why.

        Raises InputError when there is no such folder, or it cannot be read; a folder in it that
        cannot is Unusable.
        """
        if not self._files.isdir(self._root):
            raise InputError(f"There is no registry at {self.url}; give a folder of maps.")
        found, unread = list_files(self._files, self._root)
        for path, error in unread:
            if not self._relative(path):
                raise InputError(f"The registry {self.url} cannot be read ({error}).") from error
            yield Unusable(
                repr(self._relative(path))[1:-1], f"The folder cannot be read ({error})."
            )
        for path in sorted(path for path in found if path.endswith(SUFFIX)):
            if UNPRINTABLE.search(self._relative(path)):
                yield Unusable(
                    repr(self._relative(path))[1:-1], "Its name cannot be printed; rename it."
                )
                continue
            try:
                self._require_file(path)
                signed = path + SIGNATURE in found and self._is_file(path + SIGNATURE)
                yield self._entry(path, found[path]["size"], signed)
            except FileNotFoundError:
                continue  # another process took it away
            except (KvMapError, OSError) as error:
                yield Unusable(self._relative(path), str(error))

    def entries(self) -> list[Entry]:
        """The maps that can be read."""
        return [found for found in self.scan() if isinstance(found, Entry)]

    def find(self, source: Fingerprint, target: Fingerprint) -> list[Entry]:
        """The maps from ``source`` to ``target``, weight by weight: proven ones first, then by the
        gap they recovered, then the smaller one.
        """
        fitting = [entry for entry in self.entries() if entry.fits(source, target)]
        return sorted(fitting, key=_rank)

    def load(
        self, source: Fingerprint, target: Fingerprint, *, allow_unproven: bool = False
    ) -> KvMap:
        """The best map of the pair that loads: whole, signed if a key was given, and proven unless
        ``allow_unproven``. Kept in host memory for the next call.

        Raises MismatchError when the registry has no map of the pair, and the first map's error
        when none can be used.
        """
        found = self.find(source, target)
        if not found:
            raise MismatchError(
                f"{self.url} has no map between these two models. `trtllm-kvmap registry list` "
                f"shows which pairs it has; a map knows its models weight by weight."
            )
        errors = []
        for entry in found:
            try:
                return self.open(entry, allow_unproven=allow_unproven)
            except (KvMapError, OSError) as error:
                errors.append(error)
        raise errors[0]

    def open(self, entry: Entry, *, allow_unproven: bool = False) -> KvMap:
        """The map of ``entry``, read against its digest. Raises as KvMap.load does, and
        UnprovenError for a missing or wrong signature when the registry has a key.
        """
        if not allow_unproven:
            require_proven(entry.path, entry.evidence, entry.map_digest)
        if self.public_key is not None:
            signature = self._signature(entry)
            require_signature(entry.path, entry.digest, signature, self.public_key)
        key = entry.path, entry.digest
        kvmap, map_digest = self.resident.get(key, lambda: self._read(entry))
        if not allow_unproven:  # a file may name the digest of a map that is held already
            require_proven(entry.path, kvmap.evidence, map_digest)
        return kvmap

    def problems(self, entry: Entry) -> list[str]:
        """What speaks against the map of ``entry``, read as a whole; empty when nothing does.
        Raises FormatError, InputError or UnavailableError where the public key cannot be used.
        """
        found = []
        try:
            (kvmap, named), _ = self._read(entry)
            if kvmap.evidence is not None and named is not None and named != kvmap.map_digest():
                found.append("Its header names the map_digest of another map; evaluate it again.")
        except (KvMapError, OSError) as error:
            found.append(str(error))
        for side in ("source", "target"):
            prints = getattr(entry, f"{side}_fingerprint").to_json()
            found += [
                f"The {side}'s fingerprint of the {part} is no SHA-256."
                for part, digest in prints.items()
                if not DIGEST.fullmatch(str(digest))
            ]
        if why := unproven(entry.evidence, entry.map_digest):
            found.append(f"Unproven: {why}.")
        if self.public_key is not None:
            try:
                signature = self._signature(entry)
            except (FormatError, OSError) as error:
                return [*found, str(error)]
            try:
                require_signature(entry.path, entry.digest, signature, self.public_key)
            except UnprovenError as error:  # any other is of the key, not of the map
                found.append(str(error))
        return found

    def add(self, kvmap: KvMap) -> Entry:
        """Store ``kvmap`` under a name made of its pair and digest: equal maps are one file, and
        two writers never write to one name. Raises FormatError for a map that could not be listed,
        InputError where nothing can be written.
        """
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder) / "map"
            digest = kvmap.save(written)
            size = written.stat().st_size
            pair = f"{_file_name(kvmap.source.name)}-to-{_file_name(kvmap.target.name)}"
            path = f"{self._root.rstrip('/')}/{pair}-{digest[:16]}{SUFFIX}"
            with written.open("rb") as stream:  # what could not be listed is not stored
                content, _ = read_head(stream, self._relative(path), size, KIND, FORMAT_VERSION)
            signed = self._files.exists(path + SIGNATURE) and self._is_file(path + SIGNATURE)
            entry = entry_from_content(self._relative(path), size, digest, content, signed=signed)
            self._put(path, lambda part: self._files.put_file(str(written), part))
            return entry

    def sign(self, entry: Entry, private_key: bytes) -> None:
        """Sign the map of ``entry``, which is read as a whole first: nobody signs a damaged one."""
        self._read(entry)
        signature = sign(entry.digest, private_key).encode()
        path = self._absolute(entry.path) + SIGNATURE
        self._put(path, lambda part: self._files.pipe_file(part, signature))

    def _entry(self, path: str, size: int, signed: bool) -> Entry:
        with self._files.open(path, "rb") as stream:
            content, digest = read_head(stream, self._relative(path), size, KIND, FORMAT_VERSION)
        return entry_from_content(self._relative(path), size, digest, content, signed=signed)

    def _read(self, entry: Entry) -> tuple[tuple[KvMap, str | None], int]:
        """The map with its map_digest, and its size; an exchanged file, whole but another, is
        refused as well.
        """
        with self._local(entry.path) as local:
            found = read_map(local)
            size, digest = local.stat().st_size, read_digest(local)
        if digest != entry.digest:
            raise MismatchError(
                f"{entry.path} became another map meanwhile; list the registry again."
            )
        return found, size

    @contextmanager
    def _local(self, relative: str) -> Iterator[Path]:
        """The file on this machine: itself where the registry is a folder, else a copy."""
        path = self._absolute(relative)
        if isinstance(self._files, LocalFileSystem):
            yield Path(path)
            return
        with tempfile.TemporaryDirectory() as folder:
            local = Path(folder) / "map"
            try:
                self._files.get_file(path, str(local))
            except FileNotFoundError as error:
                raise FormatError(f"There is no file {relative} in {self.url}.") from error
            yield local

    def _signature(self, entry: Entry) -> str | None:
        path = self._absolute(entry.path) + SIGNATURE
        self._require_file(path)
        try:
            found: bytes = self._files.cat_file(path)
        except FileNotFoundError:
            return None
        return found.decode("ascii", errors="replace")

    def _put(self, path: str, write: Callable[[str], None]) -> None:
        """Beside its name, then renamed: whoever lists meanwhile sees the old state or the new."""
        self._require_file(path)
        part = f"{path}.{secrets.token_hex(8)}.part"
        try:
            self._files.makedirs(self._root, exist_ok=True)
            write(part)
            self._files.mv(part, path)
        except OSError as error:
            with suppress(OSError):
                self._files.rm_file(part)
            raise InputError(f"{path} cannot be written to the registry ({error}).") from error

    def _is_file(self, path: str) -> bool:
        if not isinstance(self._files, LocalFileSystem):
            return True
        try:
            return Path(path).is_file()
        except OSError:  # a name too long, or a link that may not be followed
            return False

    def _require_file(self, path: str) -> None:
        """Raise FormatError for what is there and no file: who opens a pipe waits, and what is
        moved onto a folder lands in it.
        """
        if not self._is_file(path) and os.path.lexists(path):
            raise FormatError(
                f"{self._relative(path)} is neither a file nor a link to one; take it away."
            )

    def _absolute(self, relative: str) -> str:
        return f"{self._root.rstrip('/')}/{relative}"

    def _relative(self, path: str) -> str:
        return path.removeprefix(self._root).lstrip("/")


def _rank(entry: Entry) -> tuple[bool, float, int]:
    gap = entry.gap_recovered
    return not entry.proven, float("inf") if gap is None else -gap, entry.size


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", name).strip(".") or "model"
