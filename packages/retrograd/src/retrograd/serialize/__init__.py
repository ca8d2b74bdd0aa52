"""Graphs, values and containers as plain data, and back.

In: a graph module, what stands in it, and what describes it. Out: JSON values; of those, the same again.
"""

from retrograd.serialize.documents import Reader as Reader
from retrograd.serialize.documents import Writer as Writer
from retrograd.serialize.values import checked_types as checked_types
from retrograd.serialize.values import field_types as field_types
from retrograd.serialize.values import is_of_type as is_of_type
