"""Digest chain over a committed prefix: equal digests, equal prefixes.

    d_0 = blake2b-128("outrider/1")
    d_n = blake2b-128(d_{n-1} || token_{n-1} as 4 little-endian bytes)

A chain, so that both sides extend it by one token at a time and can compare any prefix that
both have (IETF SDCP draft; docs/protocol.md).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Final

DIGEST_BYTES: Final = 16
"""128 bits: an accidental match of two different prefixes is out of the question."""


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


EMPTY: Final = _hash(b"outrider/1")


def extend(digest: bytes, tokens: Iterable[int]) -> bytes:
    """The digest after `tokens` have been appended to a prefix with digest `digest`."""
    for token in tokens:
        digest = _hash(digest + token.to_bytes(4, "little"))
    return digest


class DigestChain:
    """Digest of a growing sequence, remembered up to where it was last asked."""

    __slots__ = ("_digest", "_length")

    def __init__(self) -> None:
        self._digest = EMPTY
        self._length = 0

    def of(self, tokens: Sequence[int]) -> bytes:
        """Digest of the whole of `tokens`, which must extend what was given before."""
        if len(tokens) < self._length:
            raise ValueError("a committed prefix never shrinks")
        self._digest = extend(self._digest, tokens[self._length :])
        self._length = len(tokens)
        return self._digest


def of_prefix(tokens: Sequence[int]) -> bytes:
    """Digest of a sequence from scratch."""
    return extend(EMPTY, tokens)
