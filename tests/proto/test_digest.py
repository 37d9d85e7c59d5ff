"""The digest chain: known values, increments, and what makes two prefixes differ."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.proto.digest import EMPTY, DigestChain, extend, of_prefix

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=30)


def test_known_values():
    """As docs/protocol.md prints them."""
    assert EMPTY.hex() == hashlib.blake2b(b"outrider/1", digest_size=16).hexdigest()
    one = hashlib.blake2b(EMPTY + b"\x01\x00\x00\x00", digest_size=16).digest()
    assert of_prefix([1]) == one
    assert EMPTY.hex() == "6fc1007bfdf2a8f1d195a6531e436484"
    assert of_prefix([1, 2, 151935]).hex() == "eef48ba166c565c1060f2ed3b834ec28"


@given(TOKENS, TOKENS)
def test_chain_equals_scratch(first: list[int], second: list[int]):
    chain = DigestChain()
    assert chain.of(first) == of_prefix(first)
    assert chain.of(first + second) == of_prefix(first + second) == extend(of_prefix(first), second)
    assert chain.of(first + second) == of_prefix(first + second)


@given(TOKENS, TOKENS)
def test_equal_digests_mean_equal_prefixes(a: list[int], b: list[int]):
    assert (of_prefix(a) == of_prefix(b)) == (a == b)


def test_a_committed_prefix_never_shrinks():
    chain = DigestChain()
    chain.of([1, 2, 3])
    with pytest.raises(ValueError, match="never shrinks"):
        chain.of([1, 2])
