"""The door to facts about torch: its operators, what of it we replace or need, and its faults that we repair.

In: an operator, or the name of a table. Out: what the tables say. They are data, in TOML files; nothing else
in retrograd lists operators, private names or faults of torch.
"""

from retrograd.facts.operators import answers, fact, functions, is_of_family
from retrograd.facts.tables import read_table
