"""Serialise graphs, values and containers as plain data, and read them back.

In: a graph module, the values in it, and the records that describe it. Out: JSON values, and from those the
same objects again.
"""

from retrograd.serialize.documents import Reader as Reader
from retrograd.serialize.documents import Writer as Writer
from retrograd.serialize.files import heading_of as heading_of
from retrograd.serialize.files import packed as packed
from retrograd.serialize.files import unpacked as unpacked
