"""The map of one chunk while the source reads the next."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from trtllm_kvmap.decode.prefill import prefill
from trtllm_kvmap.decode.session.mirror import Mirror
from trtllm_kvmap.errors import InputError
from trtllm_kvmap.inject.hf_cache import HfCache, empty_cache, fork, num_entries
from trtllm_kvmap.models import LoadedModel


def read_mirrored(
    source: LoadedModel,
    token_ids: Sequence[int],
    mirror: Mirror,
    cache: HfCache | None = None,
    *,
    chunk_tokens: int = 512,
) -> HfCache:
    """Let ``source`` read ``token_ids`` chunk by chunk, and map each chunk while it reads the next.

    Returns the source's cache; ``mirror`` then stands ready for ``hand_over``. ``cache`` (None:
    empty) holds what the source has read of ``token_ids`` already and is extended in place.

    Promises the very numbers of the same chunks read and mapped one after the other: a worker
    thread maps from a chunk's own tensors, which the next pass does not write. What is gained
    depends on cores that the source leaves idle; on a GPU both queue on one stream and nothing is.
    Raises InputError for a source that is not the mirror's.
    """
    if source is not mirror.bridge.source or chunk_tokens < 1:
        raise InputError(
            f"The mirror follows {mirror.bridge.source.name}; read with that model, in chunks of "
            f"at least 1 token (got {source.name} and {chunk_tokens})."
        )
    cache = empty_cache() if cache is None else cache
    mapped: Future[None] | None = None
    with ThreadPoolExecutor(1) as worker:
        for start in range(num_entries(cache), len(token_ids), chunk_tokens):
            stop = min(start + chunk_tokens, len(token_ids))
            prefill(source, token_ids[start:stop], cache, logits_to_keep=1)
            if mapped is not None:
                mapped.result()
            mapped = worker.submit(mirror.follow, fork(cache), token_ids)
        if mapped is not None:
            mapped.result()
    return cache
