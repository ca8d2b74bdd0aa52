"""The named policies.

In: nothing. Out: `POLICIES`. The first ones are each about one kind of thing that goes wrong; those further
down make optimisations of a compiler fire (as YARPGen's generation policies do); `mixed` weighs everything.
"""

from __future__ import annotations

from gradparity.generate.policy import EDGES, Policy

PLAIN = {"unary": 3.0, "binary": 3.0, "reduction": 1.0}
VIEWS = {"view": 4.0, "move": 1.0}
RECOMPUTE = {"budget": 0.35, "recompute": 0.15, "autograd": 0.05, "caches": 0.05}

_ALL = (
    Policy("elementwise", "chains of elementwise operators, reductions and casts", PLAIN | {"cast": 0.7, "view": 0.5}),
    Policy(
        "layouts",
        "operators whose derivative looks at the layout of cotangents and inputs",
        {"norm": 4, "move": 2, "view": 2, "reduction": 2, "convolution": 1, "linear": 1, "unary": 1},
        length=(1, 3),
        layouts={"plain": 3, "turned": 3, "gapped": 2, "expanded": 2, "channels_last": 2, "offset": 1},
        losses={"cotangents": 5, "weighted": 3, "sum": 3, "some": 1},
        ranks={2: 3, 3: 4, 4: 3},
    ),
    Policy("linear", "matrix products, convolutions, losses", {"linear": 4, "convolution": 2, "unary": 2, "norm": 1, "view": 1}),
    Policy("solve", "linear algebra", {"solve": 4, "linear": 1, "unary": 1}, length=(1, 3), sizes={3: 5, 2: 4, 4: 3, 1: 1}),
    Policy("attention", "attention in every spelling", {"attention": 5, "linear": 1, "unary": 1, "view": 1}, length=(1, 3)),
    Policy("views", "views of views, gapped and overlapping", {**VIEWS, "unary": 2, "binary": 2, "cast": 0.3}, length=(3, 9)),
    Policy(
        "indexing",
        "indexing and scattering at edges",
        {"index": 3, "scatter": 6, "view": 1, "unary": 1, "binary": 1, "inplace": 0.5},
        length=(1, 4),
        sizes={3: 4, 1: 4, 2: 4, 4: 3, 5: 3, 8: 1, 0: 0.3, 17: 0.5},
        without_grad=0.2,
    ),
    Policy(
        "edges",
        "sizes around those of vectors, warps and blocks",
        {"unary": 2, "binary": 2, "reduction": 4, "norm": 1.5, "view": 1, "move": 1.5, "index": 1, "scatter": 1, "linear": 0.7},
        length=(1, 4),
        sizes=EDGES,
        ranks={1: 4, 2: 5, 3: 1},
    ),
    Policy(
        "mutation",
        "changes in place, through views, at indices, and of inputs",
        {"inplace": 5, "through_view": 5, "overwritten": 1, "view": 2, "scatter": 1.5, "unary": 2, "binary": 1, "metadata": 0.7, "no_grad": 0.7},
        length=(2, 6),
        changed=0.7,
        without_grad=0.35,
        aliased=0.1,
        between=0.15,
        outputs={"one": 3, "some": 4, "views": 2, "inputs": 3, "nested": 0.5, "twice": 0.3},
    ),
    Policy(
        "aliasing",
        "inputs that share memory, and outputs that are views",
        {"inplace": 3, "through_view": 2, "view": 4, "unary": 2, "binary": 2},
        length=(1, 5),
        inputs=(2, 4),
        aliased=0.7,
        changed=0.6,
        without_grad=0.4,
        outputs={"one": 2, "some": 3, "views": 4, "inputs": 4, "twice": 1},
    ),
    Policy(
        "outputs",
        "outputs that are views, inputs, detached, repeated or unused",
        {"unary": 3, "view": 4, "binary": 2, "no_grad": 1.5, "move": 0.5},
        length=(1, 4),
        outputs={"one": 1, "some": 4, "views": 5, "inputs": 2, "nested": 2, "twice": 1},
        losses={"some": 5, "sum": 2, "two_backwards": 3, "grad": 2, "cotangents": 2},
        between=0.15,
    ),
    Policy(
        "functions",
        "custom autograd.Functions",
        {"function": 6, "unary": 2, "binary": 1, "view": 1, "no_grad": 0.3},
        length=(1, 4),
        changed=0.4,
        losses={"sum": 3, "cotangents": 3, "some": 2, "grad": 2, "twice": 2, "two_backwards": 1, "double": 0.3},
    ),
    Policy(
        "transforms",
        "torch.func, derivatives inside the function, branches",
        {"transform": 5, "higher_order": 0.7, "unary": 1, "binary": 1},
        length=(1, 3),
        ranks={1: 4, 2: 4},
        dtypes={"float32": 1},
    ),
    Policy(
        "modules",
        "modules with shared parameters and buffers",
        {"unary": 2, "binary": 2, "norm": 1, "linear": 0.5, "inplace": 0.3, "view": 0.5},
        length=(1, 4),
        form="module",
        hooks=1.0,
        dtypes={"float32": 1},
    ),
    Policy(
        "hooks",
        "hooks of all kinds, over several leaves",
        {"unary": 3, "binary": 4, "linear": 1, "module": 2, "hook_inside": 1.0, "view": 0.5},
        inputs=(2, 4),
        hooks=2.5,
        dtypes={"float32": 1},
        losses={"sum": 4, "cotangents": 2, "some": 2, "two_backwards": 1.5, "twice": 1, "inputs": 1},
    ),
    Policy(
        "random",
        "random numbers, and recomputation of what they made",
        {"random": 5, "unary": 3, "binary": 1, "view": 0.5, "checkpoint": 1, "reduction": 0.5},
        settings=RECOMPUTE,
        dtypes={"float32": 1},
    ),
    Policy(
        "islands",
        "checkpoint, no_grad, autocast, graph breaks",
        {"checkpoint": 3, "no_grad": 3, "autocast": 3, "break": 1, "unary": 2, "linear": 2, "binary": 1},
        settings={"autocast": 0.15, "budget": 0.1},
        length=(2, 6),
    ),
    Policy(
        "autocast",
        "autocast around and inside, switched off for a part",
        {"autocast": 4, "linear": 4, "cast": 2, "unary": 1, "norm": 1, "checkpoint": 0.5},
        settings={"autocast": 0.5},
        dtypes={"float32": 3, "bfloat16": 2},
        length=(1, 4),
    ),
    Policy("complex", "complex numbers", {"complex": 6, "view": 1, "unary": 0.5}, length=(1, 4), dtypes={"float32": 1}),
    Policy(
        "subclasses",
        "wrapper subclasses among the inputs",
        {"subclass": 2, "unary": 3, "binary": 3, "view": 1, "reduction": 1, "move": 0.5},
        dtypes={"float32": 1},
        layouts={"plain": 1},
    ),
    Policy(
        "custom_ops",
        "custom operators with odd strides or effects",
        {"custom_op": 4, "unary": 1, "binary": 1, "view": 2, "norm": 0.5, "linear": 0.5},
        length=(1, 5),
        dtypes={"float32": 1},
        without_grad=0.2,
    ),
    Policy(
        "python",
        "Python objects that the function reads and changes",
        {"python": 5, "unary": 2, "binary": 1, "break": 0.7},
        calls=(1, 3),
        dtypes={"float32": 1},
    ),
    Policy(
        "samples",
        "operators of torch's own database, with inputs and cotangents laid out anyhow",
        {"sample": 5, "unary": 0.5, "view": 0.5},
        length=(1, 2),
        inputs=(1, 1),
        layouts={"plain": 4, "turned": 3, "gapped": 2, "expanded": 1, "channels_last": 1, "offset": 1},
    ),
    Policy(
        "phases",
        "what changes between forward and backward",
        PLAIN | {"linear": 3, "view": 2, "norm": 1, "function": 0.5},
        length=(1, 4),
        settings={"budget": 0.3},
        between=0.9,
        without_grad=0.0,
    ),
    Policy(
        "second_order",
        "double backward and graphs used again",
        PLAIN | {"linear": 1, "norm": 0.5, "view": 0.5},
        length=(1, 4),
        losses={"double": 5, "twice": 2, "two_backwards": 3, "grad": 1},
        dtypes={"float32": 1},
    ),
    # from here on: several steps, with a change between two of them
    *(
        Policy(f"steps_{name}", f"several steps of training; between two of them, {doc}", {}, form="training", areas=areas)
        for name, doc, areas in (
            ("hooks", "hooks come and go", {"hooks": 1}),
            ("requires_grad", "parameters are frozen", {"requires_grad": 1}),
            ("parameters", "parameters are replaced, tied, swapped", {"parameters": 1}),
            ("grads", "`.grad` is preset", {"grads": 1}),
            ("modes", "modes change", {"modes": 1}),
            ("inputs", "shapes and layouts change", {"inputs": 1}),
            ("state", "numbers, buffers and attributes change", {"state": 1}),
            ("optimizer", "the optimizer changes", {"optimizer": 1}),
            ("threads", "a thread trains beside it", {"threads": 1}),
            ("errors", "something raises, and training goes on", {"errors": 1}),
            (
                "mixed",
                "anything changes",
                {
                    "hooks": 3, "requires_grad": 1, "parameters": 2, "grads": 2, "modes": 1, "inputs": 2, "state": 2,
                    "optimizer": 1, "threads": 0.5, "errors": 1,
                },
            ),
        )
    ),
    # from here on: what makes optimisations fire
    Policy(
        "fusion",
        "long chains that fuse: pointwise into reductions and back",
        {"unary": 4, "binary": 4, "reduction": 3, "norm": 2, "cast": 1, "move": 1},
        length=(6, 16),
        sizes={8: 2, 16: 2, 17: 1, 32: 1, 33: 1, 1: 1},
        settings={"inductor": 0.2, "budget": 0.1},
    ),
    Policy(
        "patterns",
        "what pattern matchers look for: attention, addmm, cat of split, no-op views and pads",
        {"attention": 2, "linear": 4, "move": 4, "view": 3, "convolution": 1, "cast": 2, "unary": 1},
        length=(2, 7),
        settings={"inductor": 0.1},
    ),
    Policy(
        "reinplacing",
        "functional scatters that a compiler may do in place, and reads and writes around them",
        {"scatter": 4, "overwritten": 4, "inplace": 3, "view": 1.5, "index": 1, "unary": 1, "through_view": 1},
        length=(2, 6),
        changed=0.6,
        without_grad=0.6,
        dtypes={"float32": 1},
        outputs={"one": 3, "some": 4, "inputs": 2},
    ),
    Policy(
        "budget",
        "recomputation under a memory budget",
        {"unary": 4, "binary": 3, "random": 1.5, "norm": 1, "linear": 1, "reduction": 1, "inplace": 0.7, "view": 1},
        length=(3, 9),
        settings={"budget": 0.7, "recompute": 0.4},
        between=0.3,
        changed=0.2,
        dtypes={"float32": 1},
    ),
    Policy(
        "dynamic",
        "symbolic sizes",
        {"view": 3, "move": 2, "unary": 2, "reduction": 2, "linear": 2, "index": 1, "binary": 2},
        settings={"dynamic": 0.9},
        dtypes={"float32": 1},
    ),
    Policy(
        "mixed",
        "a little of everything",
        {
            "unary": 3, "binary": 3, "reduction": 1.5, "view": 2, "move": 1, "index": 1, "scatter": 1, "linear": 1.5,
            "norm": 1, "convolution": 0.5, "inplace": 1.5, "through_view": 1, "cast": 0.7, "no_grad": 0.5,
            "checkpoint": 0.5, "function": 1, "module": 0.7, "random": 0.5, "autocast": 0.3, "transform": 0.4,
            "complex": 0.3, "attention": 0.3, "custom_op": 0.2, "python": 0.3, "break": 0.2, "hook_inside": 0.2,
        },
        length=(4, 14),
        hooks=0.6,
        changed=0.3,
        aliased=0.15,
        between=0.1,
        settings={"budget": 0.1, "recompute": 0.1, "dynamic": 0.05, "inductor": 0.1},
    ),
)  # fmt: skip

POLICIES: dict[str, Policy] = {policy.name: policy for policy in _ALL}
"""By name, in the order in which a campaign goes round."""
