"""The door to Inductor and torch's partitioners.

In: graphs, and the state of torch in this process. Out: code, keys of Inductor's cache, what to save.
"""

from retrograd._torch.inductor.compile import (
    chooses_layouts,
    compile_graph,
    get_ready,
    with_joint_passes,
)
from retrograd._torch.inductor.decomposition_table import decompositions
from retrograd._torch.inductor.disk_cache import (
    UNFINISHED,
    cache_folder,
    environment,
    replacing,
    why_not_trusted,
)
from retrograd._torch.inductor.options import (
    Portable,
    compile_threads,
    import_everything,
    patched,
    portable_settings,
    settings,
    take_settings,
)
from retrograd._torch.inductor.partition import cut_by, memory_budget
