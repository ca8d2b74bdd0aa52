#!/usr/bin/env bash
# torch.nn.parallel.DistributedDataParallel of torch 2.13.0: which callables may be communication hooks.
#
# One gloo rank registers the same hook in six forms: a function without annotations; with the documented annotations; with
# the same annotations in a module that postpones them (`from __future__ import annotations`); with `Future` instead of
# `Future[Tensor]`; a functools.partial; and an object with `__call__`.
#
# Guess: all six work. Python does not look at annotations when it calls a function, and the documents ask for a callable.
# Seen:  two work, with and without annotations. The other four are refused when they are registered: ValueError for postponed
#        annotations and for `Future`, AttributeError for the partial and the object.
# Why:   torch compares the annotations with two literal values, and postponed ones are text. It then reads the hook's
#        `__qualname__` for its log, which partials and most objects do not have.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
cat > "$folder/postponed.py" <<'PY'
from __future__ import annotations

import torch
import torch.distributed as dist


def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future
PY
cat > "$folder/program.py" <<'PY'
import functools
import warnings

import postponed
import torch
import torch.distributed as dist
from torch import nn

warnings.simplefilter("ignore")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def plain(state, bucket):
    return postponed.hook(state, bucket)


def annotated(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return postponed.hook(state, bucket)


def of_any_future(state: object, bucket: dist.GradBucket) -> torch.futures.Future:
    return postponed.hook(state, bucket)


class Twice:
    def __call__(self, state, bucket):
        return postponed.hook(state, bucket)


forms = {
    "without annotations": plain,
    "annotated": annotated,
    "annotations postponed": postponed.hook,
    "any future": of_any_future,
    "partial": functools.partial(plain),
    "object": Twice(),
}
for form, hook in forms.items():
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1, bias=False))
    try:
        model.register_comm_hook(None, hook)
    except Exception as error:
        print(f"{form}: {type(error).__name__}")
        continue
    model(torch.ones(1, 2)).sum().backward()
    print(f"{form}: gradient {model.module.weight.grad.tolist()[0]}")
dist.destroy_process_group()
PY
cd "$folder"
"$folder/venv/bin/python" program.py 2>/dev/null | tee seen
diff seen - <<'SEEN'
without annotations: gradient [2.0, 2.0]
annotated: gradient [2.0, 2.0]
annotations postponed: ValueError
any future: ValueError
partial: AttributeError
object: AttributeError
SEEN
echo "as stated"
