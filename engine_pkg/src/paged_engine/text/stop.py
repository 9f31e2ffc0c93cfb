"""Stop strings over a text that arrives in parts, independent of where the parts are cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets a text through up to its first stop string.

    The first stop string is the one that is complete first; of several that end at the same character it is the
    longest, so that no part of it is shown. Held back is only what may still become a stop string: the longest suffix
    of the text so far that begins one.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._scans = [_Scan(stop) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """What may be shown once `text` has arrived. Not to be called any more after a match.

        Args:
            text: the next part of the whole text.
            may_stop: False where a stop string that is completed within `text` does not count.
        """
        ends = [(end, scan.stop) for scan in self._scans if (end := scan.advance(text, may_stop)) is not None]
        whole = self._held + text
        if ends:
            end, self.matched = min(ends, key=lambda found: (found[0], -len(found[1])))
            end += len(self._held)
            self._held = ""
            return whole[: end if self._include_stop else end - len(self.matched)]
        num_shown = len(whole) - max((scan.num_matched for scan in self._scans), default=0)
        self._held = whole[num_shown:]
        return whole[:num_shown]

    def finish(self) -> str:
        """The part held back, now that nothing follows that could complete a stop string."""
        held, self._held = self._held, ""
        return held


class _Scan:
    """The search for one stop string (Knuth, Morris, Pratt: a constant number of steps per character).

    The table of borders grows only as far as the text has ever matched, so a stop string costs nothing for its length.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        """Length of the longest suffix of the text that is a proper prefix of the stop string."""
        self._borders = [0]

    def advance(self, text: str, may_stop: bool) -> int | None:
        """Scan `text`; the position behind the stop string's first end in it, or None where it does not end."""
        if self.num_matched == 0 and self.stop[0] not in text:
            return None
        for position, character in enumerate(text, start=1):
            while self.num_matched and self.stop[self.num_matched] != character:
                self.num_matched = self._border(self.num_matched)
            if self.stop[self.num_matched] == character:
                self.num_matched += 1
            if self.num_matched == len(self.stop):
                if may_stop:
                    return position
                self.num_matched = self._border(self.num_matched)
        return None

    def _border(self, length: int) -> int:
        """Length of the longest proper prefix of `stop[:length]` that is its suffix too."""
        while len(self._borders) < length:
            character = self.stop[len(self._borders)]
            border = self._borders[-1]
            while border and self.stop[border] != character:
                border = self._borders[border - 1]
            self._borders.append(border + (self.stop[border] == character))
        return self._borders[length - 1]
