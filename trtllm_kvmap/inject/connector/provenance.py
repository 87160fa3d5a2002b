"""Which cached tokens are exact.

A token's KV is exact only if that of every token before it is, so along one sequence exactness is a
prefix. What is not recorded as exact counts as approximate: mapped tokens, and whatever the target
computed or decoded on top of them.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Conversations that are remembered; the oldest are forgotten first, and then count as approximate.
REMEMBERED = 4096


class _Blocks(NamedTuple):
    exact: set[bytes]
    approximate: Counter[bytes]  # by how many requests each was marked so


class Provenance:
    """The blocks of every salt, by the digest of all tokens up to each block's end.

    A block that was approximate once stays so, even if the target computes its tokens as well:
    which of the two an engine keeps is not known.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._salts: OrderedDict[str, _Blocks] = OrderedDict()

    def note(self, salt: str, token_ids: Sequence[int], exact: int, marked: set[bytes]) -> None:
        """The engine may hold these tokens under ``salt``, the first ``exact`` of them exactly. A
        last block that is not full does not count. ``marked`` are the blocks that this request has
        marked approximate so far, and is added to.
        """
        blocks = self._salts.setdefault(salt, _Blocks(set(), Counter()))
        for end, digest in self._digests(token_ids):
            if end <= exact:
                blocks.exact.add(digest)
            elif digest not in marked:
                marked.add(digest)
                blocks.approximate[digest] += 1
        self._salts.move_to_end(salt)
        while len(self._salts) > REMEMBERED:
            self._salts.popitem(last=False)

    def retract(self, salt: str, marked: set[bytes]) -> None:
        """What this request has marked approximate never came to be; what others marked stays."""
        if salt in self._salts:
            approximate = self._salts[salt].approximate
            for digest in marked & approximate.keys():
                approximate[digest] -= 1
                if not approximate[digest]:
                    del approximate[digest]
        marked.clear()

    def exact_tokens(self, salt: str, token_ids: Sequence[int]) -> int:
        """How many first tokens of ``token_ids`` are known to be exact, in whole blocks."""
        blocks = self._salts.get(salt)
        known = blocks.exact - blocks.approximate.keys() if blocks else set()
        count = 0
        for end, digest in self._digests(token_ids) if known else ():
            if digest not in known:
                break
            count = end
        return count

    def _digests(self, token_ids: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """(end, digest of tokens 0 .. end - 1) of every full block."""
        sha = hashlib.sha256()
        size = self._tokens_per_block
        for end in range(size, len(token_ids) + 1, size):
            for token in token_ids[end - size : end]:
                sha.update(int(token).to_bytes(8, "big"))
            yield end, sha.copy().digest()
