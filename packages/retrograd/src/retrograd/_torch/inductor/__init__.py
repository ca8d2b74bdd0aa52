"""The door to Inductor and torch's partitioners. Inductor itself is imported when it is first used.

In: ATen graphs. Out: compiled code, and the names of values to save.
"""

from retrograd._torch.inductor.compiler import compile_graph, decompositions, patched, settings
from retrograd._torch.inductor.disk import cache_folder, environment
from retrograd._torch.inductor.min_cut import cut_by
