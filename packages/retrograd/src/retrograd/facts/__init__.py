"""The interface to facts about torch: its operators, what we replace or require, and faults that we repair.

In: an operator, or the name of a table. Out: the table's contents. The tables are TOML files. No other place
in retrograd lists operators, private names or faults of torch.
"""

from retrograd.facts.operators import answers, fact, functions, is_of_family
from retrograd.facts.tables import read_table
