"""shard: which part of the work is this machine's.

In: "2/8". Out: a Shard that takes an eighth of all names, the same ones on every machine and in every
version.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from gradparity.errors import SettingsError

FORM = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Shard:
    """The `number`-th of `total` parts, counted from 1."""

    number: int = 1
    total: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The inverse of `str`. Raises SettingsError for anything else."""
        found = FORM.fullmatch(text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise SettingsError(f"not a shard: {text!r}\n  form   i/n, with i from 1 to n, as in 2/8")
        return cls(int(found[1]), int(found[2]))

    def takes(self, name: str) -> bool:
        """Whether this name falls into this shard."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.total == self.number - 1

    def __str__(self) -> str:
        return f"{self.number}/{self.total}"
