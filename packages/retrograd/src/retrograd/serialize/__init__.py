"""Graphs, values and containers as plain data, and back.

In: a graph module, what stands in it, and what describes it. Out: JSON values; of those, the same again.
"""

from retrograd.serialize.documents import Reader as Reader
from retrograd.serialize.documents import Writer as Writer
from retrograd.serialize.files import heading_of as heading_of
from retrograd.serialize.files import packed as packed
from retrograd.serialize.files import unpacked as unpacked
