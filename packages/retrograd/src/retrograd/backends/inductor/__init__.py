"""The single entry point to Inductor and torch's partitioners.

In: graphs, and the state of torch in this process. Out: code, keys of Inductor's cache, what to save.
"""

from retrograd.backends.inductor.compile import (
    chooses_layouts,
    compile_graph,
    get_ready,
    with_joint_passes,
)
from retrograd.backends.inductor.decomposition_table import decompositions
from retrograd.backends.inductor.disk_cache import (
    UNFINISHED,
    cache_folder,
    environment,
    replacing,
    why_not_trusted,
)
from retrograd.backends.inductor.options import (
    Portable,
    compile_threads,
    import_everything,
    patched,
    portable_settings,
    settings,
    take_settings,
)
from retrograd.backends.inductor.partition import cut_by, memory_budget
from retrograd.backends.inductor.seeds import (
    draw_from_seed,
    draws_own_numbers,
    has_own_numbers,
    numbers_of_seed,
)
