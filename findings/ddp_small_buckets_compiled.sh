#!/usr/bin/env bash
# DistributedDataParallel of torch 2.13.0 with `bucket_cap_mb` below 1: eager trains, `torch.compile` raises.
#
# One gloo rank trains six linear layers, wrapped by DDP with buckets of 25, 1 and 0.5 MB, in eager and under
# `torch.compile(backend="aot_eager")`.
#
# Guess: it compiles as with 25 MB, into more graphs, since Dynamo divides the model where DDP's buckets end.
# Seen:  25 and 1 MB compile. 0.5 MB raises an AssertionError about the first bucket at the first call, while eager trains with
#        it. With `torch._dynamo.config.optimize_ddp = False` it compiles, and gradients equal eager's.
# Why:   Dynamo takes the first bucket that DDP has by default, 1 MiB, and requires that no bucket is smaller. DDP itself has
#        no such rule.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/program.py" <<'PY'
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

warnings.simplefilter("ignore")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/meeting", rank=0, world_size=1)
torch.manual_seed(0)
net, x = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]), torch.randn(2, 64)


def gradients(prepare):
    torch._dynamo.reset()
    net.zero_grad()
    prepare()(x).sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in net.parameters()])


def shown(cap, is_divided):
    wrapped = lambda: DistributedDataParallel(net, bucket_cap_mb=cap)
    eager = gradients(wrapped)
    with torch._dynamo.config.patch(optimize_ddp=is_divided):
        try:
            compiled = gradients(lambda: torch.compile(wrapped(), backend="aot_eager"))
        except AssertionError as error:
            return f"AssertionError, which names the first bucket: {'First bucket' in str(error)}"
    return f"as eager: {torch.allclose(eager, compiled)}"


found = {key: shown(*key) for key in [(25, True), (1, True), (0.5, True), (0.5, False)]}
for (cap, is_divided), text in found.items():
    print(f"bucket_cap_mb={cap}, optimize_ddp={is_divided}: {text}")
dist.destroy_process_group()
assert [*found.values()] == [
    "as eager: True", "as eager: True", "AssertionError, which names the first bucket: True", "as eager: True",
], "torch does something else now"
PY
"$folder/venv/bin/python" "$folder/program.py" "$folder" 2> "$folder/log" || { cat "$folder/log"; exit 1; }
