"""Graphs, values and containers as plain data, and back.

In: a graph module, what stands in it, and what describes it. Out: JSON values; of those, the same again.
"""

from retrograd.serialize.containers import read_spec as read_spec
from retrograd.serialize.containers import serialize_spec as serialize_spec
from retrograd.serialize.graphs import give_examples as give_examples
from retrograd.serialize.graphs import read_examples as read_examples
from retrograd.serialize.graphs import read_graph as read_graph
from retrograd.serialize.graphs import serialize_examples as serialize_examples
from retrograd.serialize.graphs import serialize_graph as serialize_graph
from retrograd.serialize.values import checked_types as checked_types
from retrograd.serialize.values import field_types as field_types
from retrograd.serialize.values import is_of_type as is_of_type
from retrograd.serialize.values import read_value as read_value
from retrograd.serialize.values import serialize_value as serialize_value
