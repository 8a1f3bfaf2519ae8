"""What is in which page: full pages by the tokens up to their end, so that a request computes no prefix twice.

The name of a page is a chained sha256: of the tenant's salt, of the name of the page before it, and of its own token
ids. Equal names therefore mean equal tokens from the very first one on, at equal positions, which is all that keys and
values depend on. A hash that an attacker cannot collide, as one page of another's answer would be enough to steer it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence


def extend_digests(digests: list[bytes], tokens: Sequence[int], page_size: int, count: int, salt: str) -> None:
    """Appends the names of the first `count` pages of `tokens` that `digests` lacks. All of them must be full."""
    assert count * page_size <= len(tokens), "no full page"
    last = digests[-1] if digests else hashlib.sha256(salt.encode(errors="surrogatepass")).digest()
    for page in range(len(digests), count):
        ids = array("i", tokens[page * page_size : (page + 1) * page_size])
        last = hashlib.sha256(last + ids.tobytes()).digest()
        digests.append(last)


class PrefixCache:
    """Known pages by name. `idle` are those that nobody owns, in the order in which they were given back.

    `queries` and `hits` count tokens of prompts, each once: all of them, and those that were found.
    """

    def __init__(self) -> None:
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.queries = self.hits = 0
        self._pages: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    def knows(self, page: int) -> bool:
        return page in self._names

    def find(self, digests: list[bytes]) -> list[int]:
        """The pages of the longest known prefix."""
        pages = []
        for digest in digests:
            page = self._pages.get(digest)
            if page is None:
                break
            pages.append(page)
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """Names a full page that has an owner. Of two pages with one name, the first one stays known."""
        if digest not in self._pages:
            assert page not in self._names, f"page {page} has a name"
            self._pages[digest], self._names[page] = page, digest

    def forget(self, page: int) -> None:
        """Takes the name of a page away, if it has one: nobody will find it. It must have an owner."""
        assert page not in self.idle
        name = self._names.pop(page, None)
        if name is not None:
            del self._pages[name]

    def evict(self) -> int:
        """The page that nobody used for longest, without a name. Raises IndexError when all have owners."""
        if not self.idle:
            raise IndexError("no page is idle")
        page, _ = self.idle.popitem(last=False)
        self.forget(page)
        return page
