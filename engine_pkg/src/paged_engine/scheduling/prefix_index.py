"""Prefix index: which page holds the keys and values of which prefix.

A page's keys and values depend on all tokens up to its end, so its key is a digest of the previous page's key and its own
tokens: equal keys mean equal prefixes. The chain starts from the request's cache salt, so that requests of different salts
never meet. The digest is cryptographic (BLAKE2b, 256 bits): nobody can craft a prompt that collides with another's.
"""

from __future__ import annotations

from hashlib import blake2b

from paged_engine.scheduling.sequence import Sequence

_DIGEST_BYTES = 32


def page_key(sequence: Sequence, page: int, page_size: int) -> bytes:
    """The key of a sequence's page number `page` (0 is its first), all of whose tokens must be known.

    Keys are kept on the sequence: each is computed once, also when the sequence is preempted and comes back.
    """
    keys = sequence.page_keys
    while len(keys) <= page:
        start = len(keys) * page_size
        parent = keys[-1] if keys else _root_key(sequence.cache_salt)
        tokens = sequence.token_ids[start : start + page_size].tobytes()
        keys.append(blake2b(parent + tokens, digest_size=_DIGEST_BYTES, person=b"page").digest())
    return keys[page]


def _root_key(cache_salt: str) -> bytes:
    salt = cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(salt, digest_size=_DIGEST_BYTES, person=b"salt").digest()


class PrefixIndex:
    """Keys and pages, one to one."""

    def __init__(self) -> None:
        self.page_by_key: dict[bytes, int] = {}
        self.key_by_page: dict[int, bytes] = {}

    def find(self, key: bytes) -> int | None:
        """The page that holds this prefix's last page of tokens, if any does."""
        return self.page_by_key.get(key)

    def add(self, key: bytes, page: int) -> None:
        """Enter a page whose tokens are all computed. A prefix that is there already keeps its page; this one stays out."""
        if key not in self.page_by_key:
            self.page_by_key[key] = page
            self.key_by_page[page] = key

    def remove(self, page: int) -> None:
        """Forget a page, since it is about to hold something else."""
        del self.page_by_key[self.key_by_page.pop(page)]

    def __contains__(self, page: int) -> bool:
        return page in self.key_by_page
