"""Maps that are ready to run, while a device has room for them; the rest waits in host memory."""

from __future__ import annotations

from trtllm_kvmap.artifact.fingerprint import Fingerprint
from trtllm_kvmap.artifact.registry import Registry
from trtllm_kvmap.artifact.resident import Resident
from trtllm_kvmap.mapper.backends import make_mapper
from trtllm_kvmap.mapper.contract import Mapper

BYTES_PER_PARAMETER = 4  # mappers multiply in float32, whatever a map is stored in


class ReadyMappers:
    """Mappers of the proven maps of ``registry``, at most ``device_bytes`` of matrices.

    The pair that was used least recently leaves the device first; its map stays in the registry's
    host memory, within that bound, so that it comes back without being read again.
    """

    def __init__(self, registry: Registry, device_bytes: int | None, backend: str = "cpu") -> None:
        self.registry, self.backend = registry, backend
        self.resident: Resident[Mapper] = Resident(device_bytes)

    def mapper(self, source: Fingerprint, target: Fingerprint) -> Mapper:
        """Raises as Registry.load does: an unproven map maps for nobody here."""

        def make() -> tuple[Mapper, int]:
            kvmap = self.registry.load(source, target)
            return make_mapper(kvmap, self.backend), BYTES_PER_PARAMETER * kvmap.num_parameters

        return self.resident.get((source, target), make)
