#!/usr/bin/env bash
# torch.distributed.pipelining of torch 2.13.0: in the first step, module hooks run more often than in later ones.
#
# Two gloo ranks train a pipeline of two stages with `Schedule1F1B` and two microbatches. Each stage has a forward hook and
# a full backward hook on a module, and a post-accumulate hook on a weight.
#
# Guess: each hook runs once for each microbatch, in every step, since a microbatch has one forward and one backward.
# Seen:  in the first step the forward hooks run three times on both ranks, and on the last rank the full backward hook runs
#        three times as well. In the second step each hook runs twice. Post-accumulate hooks run twice in both steps, and
#        gradients are equal. So whoever counts calls, or sums what hooks see, has to leave the first step out.
# Why:   before its first microbatch, a stage finds out sizes by a forward, and the last stage by a backward, over tensors
#        of its own. Hooks of the user's modules run in them, and cannot tell them from a microbatch.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def run(rank, place, found):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{place}/meeting", rank=rank, world_size=2)
    torch.manual_seed(0)
    part, calls = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), []
    part[0].register_forward_hook(lambda *_: calls.append("forward"))
    part[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    part[1].weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulate"))
    schedule = Schedule1F1B(
        PipelineStage(part, rank, 2, torch.device("cpu")),
        n_microbatches=2,
        loss_fn=lambda result, target: (result - target).square().mean(),
    )
    grads = []
    for step in range(2):
        calls.clear()
        part.zero_grad()
        if rank == 0:
            schedule.step(torch.ones(4, 4))
        else:
            schedule.step(target=torch.zeros(4, 4))
        grads.append(part[1].weight.grad.clone())
        found[rank, step] = tuple(calls.count(kind) for kind in ("forward", "backward", "accumulate"))
    found[rank, "equal"] = torch.equal(*grads)
    dist.destroy_process_group()


if __name__ == "__main__":
    with torch.multiprocessing.Manager() as manager:
        found = manager.dict()
        torch.multiprocessing.spawn(run, (sys.argv[1], found), 2)
        found = dict(found)
    print("calls of forward, backward and accumulation hooks, by rank and step:")
    for key in sorted(found, key=str):
        print(" ", key, found[key])
    later = (2, 2, 2)
    assert found == {
        (0, 0): (3, 2, 2), (0, 1): later, (0, "equal"): True,
        (1, 0): (3, 3, 2), (1, 1): later, (1, "equal"): True,
    }, "torch does something else now"
PY
"$folder/venv/bin/python" "$folder/program.py" "$folder"
