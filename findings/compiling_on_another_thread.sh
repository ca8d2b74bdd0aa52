#!/usr/bin/env bash
# torch 2.13.0: eager optimizers while another thread compiles.
#
# Three parameters take ten eager steps of AdamW (and of Adam, NAdam and RAdam) twice: alone, and while a second thread is inside
# the backend of a `torch.compile`d function that has nothing to do with them. The second thread waits there until the steps are
# done, so the two never run at the same moment.
#
# Guess: the same bits. The steps are eager, on data of their own, and the other thread waits.
# Seen:  `torch.compiler.is_compiling()` is True on the thread that compiles nothing, and parameters differ in their last bits.
# Why:   since 2.13 torch says that it compiles for as long as a compiled callable's session lasts, by one variable for all threads.
#        Its optimizers ask that variable: when compiled, they count steps in tensors and compute bias corrections by other
#        operations. A thread that trains beside one that compiles is neither reproducible nor equal to the same program alone.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import threading

import torch

OPTIMIZERS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def trained(make):
    """Parameters after ten eager steps."""
    torch.manual_seed(0)
    values = [torch.randn(64, requires_grad=True) for _ in range(3)]
    optimizer = make(values, lr=1e-2)
    for _ in range(10):
        optimizer.zero_grad()
        sum((value**3).sum() for value in values).backward()
        optimizer.step()
    return torch.cat(values).detach()


def while_another_thread_compiles(run):
    """What `run` returns here while a second thread stands inside its backend."""
    inside, done = threading.Event(), threading.Event()

    def backend(graph, inputs):
        inside.set()
        done.wait()
        return graph

    torch._dynamo.reset()
    thread = threading.Thread(target=lambda: torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2)))
    thread.start()
    inside.wait()
    try:
        return run()
    finally:
        done.set()
        thread.join()


alone = {make.__name__: trained(make) for make in OPTIMIZERS}
says = while_another_thread_compiles(torch.compiler.is_compiling)
beside = while_another_thread_compiles(lambda: {make.__name__: trained(make) for make in OPTIMIZERS})
print(f"is_compiling() alone: {torch.compiler.is_compiling()}, beside a thread that compiles: {says}")
differ = {}
for name, value in alone.items():
    differ[name] = not torch.equal(value, beside[name])
    print(f"{name:6} repeats alone: {torch.equal(value, trained(getattr(torch.optim, name)))}, "
          f"beside the other thread it differs by {(value - beside[name]).abs().max():.1e}")
raise SystemExit(not says or not any(differ.values()))
PY
"$folder/venv/bin/python" "$folder/program.py"
