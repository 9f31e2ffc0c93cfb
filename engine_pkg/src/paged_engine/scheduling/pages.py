"""PagePool: the only place where pages are handed out, shared and taken back.

A page is in one of three states: held (by one sequence or several), cached (by nobody, but its contents are in the prefix
index and it can be had again until it is handed out for something else), or blank. Nothing here knows what a page looks
like in memory.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from paged_engine.scheduling.prefix_index import PrefixIndex, page_key
from paged_engine.scheduling.sequence import Sequence


class IntegrityError(RuntimeError):
    """The pool's books do not balance: a fault of ours, never of a request. The message has the figures."""


class PagePool:
    """`num_pages` pages of `page_size` tokens, with reference counts and, if enabled, a prefix index.

    Pages that nobody holds are handed out blank ones first, then the least recently used cached one. A sequence gives its
    pages back last first, so that of a cached chain the end goes before what it depends on.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_caching: bool = True) -> None:
        self.num_total = num_pages
        self.page_size = page_size
        self.enable_prefix_caching = enable_prefix_caching
        self.references = [0] * num_pages
        """How many sequences hold each page."""
        self.blank = list(range(num_pages - 1, -1, -1))
        """Pages that nobody holds and nobody could reuse; the last one is next."""
        self.cached: OrderedDict[int, None] = OrderedDict()
        """Pages that nobody holds but the index knows, least recently used first."""
        self.index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Pages that could be handed out now, cached ones included."""
        return len(self.blank) + len(self.cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds but a later request may reuse."""
        return len(self.cached)

    @property
    def num_held(self) -> int:
        """Pages held by sequences; a shared one counts once."""
        return self.num_total - self.num_free

    def pages_for(self, num_tokens: int) -> int:
        """Pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_size)

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` pages with one reference each, evicting cached ones as needed.

        Raises:
            IntegrityError: fewer are free; callers look at `num_free` first.
        """
        if count > self.num_free:
            raise IntegrityError(f"{count} pages asked for, {self.num_free} of {self.num_total} are free")
        pages = [self.blank.pop() if self.blank else self._evict() for _ in range(count)]
        for page in pages:
            self.references[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of these held or cached pages."""
        for page in pages:
            if self.references[page] == 0:
                del self.cached[page]
            self.references[page] += 1

    def release(self, pages: SequenceOf[int]) -> None:
        """Take back one reference of each page of a chain, the last page first.

        Raises:
            IntegrityError: nobody holds one of them.
        """
        for page in reversed(pages):
            if self.references[page] < 1:
                raise IntegrityError(f"page {page} was given back, but nobody holds it")
            self.references[page] -= 1
            if self.references[page] == 0:
                self._set_free(page)

    def match(self, sequence: Sequence) -> list[int]:
        """The pages that hold the beginning of a sequence, found in the index; nothing is shared yet.

        Only pages of the sequence's reusable tokens, so that at least one token is left to compute and no shared page is ever
        written to.
        """
        pages: list[int] = []
        if self.enable_prefix_caching:
            for i in range(sequence.num_reusable // self.page_size):
                page = self.index.find(page_key(sequence, i, self.page_size))
                if page is None:
                    break
                pages.append(page)
        return pages

    def full_page_key(self, sequence: Sequence, page: int) -> bytes | None:
        """The key of a sequence's page number `page`, or None when not all its tokens are known or nothing is indexed."""
        if not self.enable_prefix_caching or (page + 1) * self.page_size > len(sequence.token_ids):
            return None
        return page_key(sequence, page, self.page_size)

    def enter_computed(self, sequence: Sequence, start: int) -> None:
        """Enter into the index the pages that hold position `start` or later ones, and nothing but computed, known tokens.

        That a launched step computes them is enough: whoever finds them there reads them in a later step.
        """
        if self.enable_prefix_caching:
            end = min(sequence.num_computed, len(sequence.token_ids))
            for i in range(start // self.page_size, end // self.page_size):
                self.index.add(page_key(sequence, i, self.page_size), sequence.page_table[i])

    def forget_cached(self) -> None:
        """Empty the index: what the pages hold is not to be relied on."""
        for page in list(self.index.key_by_page):
            self.index.remove(page)
        self.blank.extend(self.cached)
        self.cached.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Recount everything from the page tables of `sequences`, which must be all that hold pages.

        Raises:
            IntegrityError: pages lost or in two states, wrong reference counts, a page that is still written to but shared
                or indexed, or an index that disagrees with itself.
        """
        sequences = list(sequences)
        held = Counter(page for sequence in sequences for page in sequence.page_table)
        self._check_states(held)
        for sequence in sequences:
            self._check_writable(sequence)

    def _evict(self) -> int:
        page, _ = self.cached.popitem(last=False)
        self.index.remove(page)
        return page

    def _set_free(self, page: int) -> None:
        if page in self.index:
            self.cached[page] = None
        else:
            self.blank.append(page)

    def _check_states(self, held: Counter[int]) -> None:
        states = Counter([*self.blank, *self.cached, *held])
        figures = f"{len(self.blank)} blank + {len(self.cached)} cached + {len(held)} held, {self.num_total} in total"
        if states != Counter(range(self.num_total)):
            raise IntegrityError(f"each page must be in exactly one state: {figures}")
        wrong = [page for page in range(self.num_total) if self.references[page] != held[page]]
        if wrong:
            counted = {page: (self.references[page], held[page]) for page in wrong}
            raise IntegrityError(f"reference counts (kept, counted) differ: {counted}; {figures}")
        lost = [page for page in self.cached if page not in self.index]
        if lost or any(page in self.index for page in self.blank):
            raise IntegrityError(f"cached pages must be indexed and blank ones not: {figures}")
        if self.index.page_by_key != {key: page for page, key in self.index.key_by_page.items()}:
            raise IntegrityError("the prefix index is not one to one")

    def _check_writable(self, sequence: Sequence) -> None:
        if sequence.num_computed > len(sequence.page_table) * self.page_size:
            raise IntegrityError(f"{sequence} has computed more than its pages hold")
        if len(sequence.page_keys) * self.page_size > len(sequence.token_ids):
            raise IntegrityError(f"{sequence} has keys for pages whose tokens are not known")
        for page in sequence.page_table[sequence.num_computed // self.page_size :]:
            if self.references[page] != 1 or page in self.index:
                raise IntegrityError(
                    f"page {page} is written to by {sequence}, but it is held {self.references[page]} times "
                    f"and is {'' if page in self.index else 'not '}in the prefix index"
                )
