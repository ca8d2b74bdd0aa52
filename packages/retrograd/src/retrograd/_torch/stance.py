"""What ``torch.compiler.set_stance`` says about compiling.

In: nothing. Out: the stance's name. ``force_eager``: nothing of ours runs; ``eager_on_recompile``: no new
lowering, what would need one is interpreted; ``fail_on_recompile``: what would need one raises. The other
stances concern the forward only.
"""

from __future__ import annotations

from torch._dynamo import eval_frame

__all__ = ["compile_stance"]


def compile_stance() -> str:
    """The stance of this process."""
    return eval_frame._stance.stance
