"""Changes between two steps of training: data, by area.

In: nothing. Out: `AREAS`: rows of a title and a text. In a text, `{w}` and `{v}` are parameters of the module
`m`, `{l}` and `{k}` two of its layers, `{d}` its width, `{n}` a name that no hook has yet. `x` is the input of
the next step, and `step` runs one.
"""

from __future__ import annotations

Rows = tuple[tuple[str, str], ...]

HOOKS: Rows = (
    ("a hook on a parameter", '{w}.register_hook(p.hook("{n}"))'),
    ("a hook that changes a gradient", '{w}.register_hook(p.hook("{n}", lambda grad: grad * 2))'),
    (
        "two hooks on one parameter",
        '{w}.register_hook(p.hook("{n} one", lambda grad: grad + 1))\n{w}.register_hook(p.hook("{n} two"))',
    ),
    (
        "hooks when a gradient is accumulated",
        "for number, each in enumerate(m.parameters()):\n    each.register_post_accumulate_grad_hook("
        'p.hook(f"{n} {number}", kind="post_accumulate"))',
    ),
    (
        "a hook that removes itself",
        'def once(grad):\n    handle.remove()\n\nhandle = {w}.register_hook(p.hook("{n}", once))',
    ),
    (
        "a hook that removes another",
        'later = {w}.register_hook(p.hook("{n} later"))\n'
        '{v}.register_hook(p.hook("{n}", lambda grad: later.remove()))',
    ),
    (
        "a hook that registers another",
        'def more(grad):\n    {v}.register_hook(p.hook("{n} inner"))\n\n{w}.register_hook(p.hook("{n}", more))',
    ),
    (
        "a hook for one step",
        'handle = {w}.register_hook(p.hook("{n}"))\nstep("with a hook", x)\nhandle.remove()',
    ),
    (
        "an optimizer in the backward",
        "def update(each):\n    each.data.add_(each.grad, alpha=-0.1)\n    each.grad = None\n\n"
        '{w}.register_post_accumulate_grad_hook(p.hook("{n}", update, kind="post_accumulate"))',
    ),
    (
        "a hook on the node that accumulates",
        "torch.autograd.graph.get_gradient_edge({w}).node.register_hook("
        'p.hook("{n}", kind="accumulate_node"))',
    ),
    ("a forward hook on a layer", 'm.{l}.register_forward_hook(p.hook("{n}", kind="module_forward"))'),
    ("a forward pre-hook", 'm.register_forward_pre_hook(p.hook("{n}", kind="module_forward_pre"))'),
    (
        "a forward hook that changes the result",
        "m.{l}.register_forward_hook(lambda module, args, result: result * 2)",
    ),
    ("a backward hook on the module", 'm.register_full_backward_hook(p.hook("{n}", kind="module_backward"))'),
    (
        "a backward hook on a layer",
        'm.{l}.register_full_backward_hook(p.hook("{n}", kind="module_backward"))',
    ),
    (
        "a backward pre-hook that changes the gradient",
        "m.{l}.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))",
    ),
    (
        "a hook over several parameters",
        "torch.autograd.graph.register_multi_grad_hook(tuple(m.parameters()), "
        'p.hook("{n}", kind="multi"), mode="any")',
    ),
    (
        "a callback at the end of the backward",
        "{w}.register_hook(lambda grad: torch.autograd.Variable._execution_engine.queue_callback("
        'p.hook("{n}", kind="callback")))',
    ),
    ("all hooks of a parameter cleared", '{w}.register_hook(p.hook("{n}"))\n{w}._backward_hooks.clear()'),
)

REQUIRES_GRAD: Rows = (
    ("a parameter is frozen", "{w}.requires_grad_(False)"),
    (
        "a parameter is frozen for one step",
        '{w}.requires_grad_(False)\nstep("frozen", x)\n{w}.requires_grad_(True)',
    ),
    ("a layer is frozen", "m.{l}.requires_grad_(False)"),
    ("everything is frozen but one", "m.requires_grad_(False)\n{w}.requires_grad_(True)"),
    ("the input requires grad", "x.requires_grad_()"),
    ("the input requires grad, with a hook", 'x.requires_grad_().register_hook(p.hook("{n}"))'),
    ("frozen, with its gradient kept", "{w}.grad = torch.ones_like({w})\n{w}.requires_grad_(False)"),
)

PARAMETERS: Rows = (
    ("a parameter is replaced", "m.{l}.weight = torch.nn.Parameter(m.{l}.weight.detach() * 2)"),
    ("two parameters are tied", "m.{l}.weight = m.{k}.weight"),
    (
        "a parameter of a class of its own",
        "class Own(torch.nn.Parameter):\n    rate = 0.5\n\n"
        "m.{l}.weight = Own(m.{l}.weight.detach())\nm.{l}.register_forward_hook("
        "lambda module, args, result: result * getattr(module.weight, 'rate', 1))",
    ),
    ("two layers change places", "m.{l}, m.{k} = m.{k}, m.{l}"),
    ("a layer is used twice", "m.{l} = m.{k}"),
    ("a layer is replaced", "m.{l} = torch.nn.Linear({d}, {d}).to(p.device, p.dtype)"),
    ("a layer becomes nothing", "m.{l} = torch.nn.Identity()"),
    ("a bias is dropped", "m.{l}.bias = None"),
    ("the data of a parameter are replaced", "{w}.data = {w}.data * 2"),
    (
        "the data of a parameter are turned",
        "{w}.data = {w}.data.mT.contiguous().mT if {w}.ndim == 2 else {w}.data * 1",
    ),
    ("a parameter is changed in place", "with torch.no_grad():\n    {w}.mul_(0.5)"),
    ("a parameter is set to another's memory", "with torch.no_grad():\n    {w}.set_({w}.detach().clone())"),
    ("a state is loaded", "m.load_state_dict({key: value * 0.5 for key, value in m.state_dict().items()})"),
    ("a parametrization", "torch.nn.utils.parametrizations.weight_norm(m.{l})"),
    (
        "a state is loaded by assignment",
        "m.load_state_dict({key: value * 1 for key, value in m.state_dict().items()}, assign=True)",
    ),
    ("one more parameter", "m.extra = torch.nn.Parameter(torch.ones({d}, device=p.device, dtype=p.dtype))"),
)

GRADS: Rows = (
    ("gradients are None", "m.zero_grad(set_to_none=True)"),
    ("gradients are zeros", "m.zero_grad(set_to_none=False)"),
    ("a gradient is there already", "{w}.grad = torch.ones_like({w})"),
    (
        "a gradient of turned layout",
        "{w}.grad = torch.ones_like({w}.mT).mT if {w}.ndim == 2 else torch.ones_like({w})",
    ),
    (
        "an expanded gradient",
        "{w}.grad = torch.ones((), device=p.device, dtype={w}.dtype).expand({w}.shape)\n{v}.grad = {v}.grad",
    ),
    (
        "a gradient with gaps",
        "{w}.grad = torch.ones((*{w}.shape, 2), device=p.device, dtype={w}.dtype)[..., 0]",
    ),
    ("a gradient that is the parameter", "{w}.grad = {w}.detach()"),
    (
        "two parameters share a gradient",
        "m.{l}.weight.grad = torch.zeros_like(m.{l}.weight)\nm.{k}.weight.grad = m.{l}.weight.grad",
    ),
    (
        "gradients are views of one buffer",
        "buffer = torch.zeros(2, {d}, {d}, device=p.device, dtype=p.dtype)\n"
        "m.{l}.weight.grad, m.{k}.weight.grad = buffer[0], buffer[1]",
    ),
    (
        "a gradient that somebody holds",
        'held = {w}.grad = torch.ones_like({w})\nstep("held", x)\np.value("held", held)',
    ),
    ("gradients that are not zeroed", "m.zero_grad = lambda *args, **kwargs: None"),
    ("a sparse gradient", "{w}.grad = torch.zeros_like({w}).to_sparse()"),
    ("a gradient of another dtype", "{w}.grad = None\n{w}.grad_dtype = torch.float64"),
    ("a gradient that requires grad", "{w}.grad = torch.ones_like({w}, requires_grad=True)"),
)

MODES: Rows = (
    ("evaluation", "m.eval()"),
    ("evaluation for one step", 'm.eval()\nstep("evaluation", x)\nm.train()'),
    ("one layer in evaluation", "m.{l}.eval()"),
    ("a step without grad", 'with torch.no_grad():\n    p.value("without grad", f(x))'),
    ("a step in inference mode", 'with torch.inference_mode():\n    p.value("inference", f(x.detach()) + 0)'),
    ("a step under autocast", 'with torch.autocast("cpu", dtype=torch.bfloat16):\n    step("autocast", x)'),
    (
        "autocast around the forward only",
        'with torch.autocast("cpu", dtype=torch.bfloat16):\n    result = f(x)\n'
        "with p.backward():\n    result.float().sum().backward()",
    ),
    ("anomaly mode for one step", 'with torch.autograd.detect_anomaly():\n    step("anomaly", x)'),
    ("gradients are switched off around", 'with torch.set_grad_enabled(False):\n    p.value("off", f(x))'),
    (
        "saved tensors are changed",
        'with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t * 2):\n    step("packed", x)',
    ),
    ("saved tensors stay on the CPU", 'with torch.autograd.graph.save_on_cpu():\n    step("on cpu", x)'),
    ("another seed", "torch.manual_seed(3)"),
)

INPUTS: Rows = (
    ("another batch size", "x = p.randn(5, {d})"),
    ("a batch of one", "x = p.randn(1, {d})"),
    ("an empty batch", "x = p.randn(0, {d})"),
    ("two more batch sizes", 'step("seven", p.randn(7, {d}))\nx = p.randn(9, {d})'),
    ("one more dimension", "x = p.randn(2, 3, {d})"),
    ("a vector", "x = p.randn({d})"),
    ("a turned input", "x = p.randn({d}, 4).t()"),
    ("an expanded input", "x = p.randn(1, {d}).expand(4, {d})"),
    ("an input with gaps", "x = p.randn(4, 2 * {d})[:, ::2]"),
    ("an input at an offset", "x = p.randn(5, {d})[1:]"),
    ("the same input again", 'step("again", x)'),
    ("an input that requires grad", "x = p.randn(4, {d}).requires_grad_()"),
    ("an input that is the output of a step", "x = f(x).detach()"),
    ("an input that is a parameter", "x = m.{l}.weight"),
    (
        "an input of another dtype",
        'try:\n    step("double", x.double())\nexcept RuntimeError as error:\n    p.value("raised", type(error).__name__)',
    ),
)

STATE: Rows = (
    ("a number changes", "m.rate = 0.25"),
    ("a number becomes an integer", "m.rate = 2"),
    ("a counter changes", "m.calls = 10"),
    ("a buffer is changed in place", "m.scale.mul_(2)"),
    ("a buffer is replaced", "m.scale = m.scale * 2"),
    (
        "a buffer becomes None",
        'm.register_buffer("scale", torch.full(({d},), 0.5, device=p.device, dtype=p.dtype))',
    ),
    ("a flag changes", "m.flag = not m.flag"),
    ("a new attribute", "m.other = 1"),
    ("the forward is replaced", "m.{l}.forward = lambda t: t * 2"),
    ("a list changes", "m.history.append(1)"),
    ("a dictionary changes", 'm.table_of["rate"] = 3.0'),
    (
        "a copy is trained",
        "import copy\ntwin = copy.deepcopy(m)\ntwin(x).sum().backward()\n"
        'p.value("twin", tuple(each.grad for each in twin.parameters()))',
    ),
    ("what was compiled is compiled again", "f = p.compile(m)"),
)

OPTIMIZER: Rows = (
    ("another rate", 'optimizer.param_groups[0]["lr"] = 0.01'),
    ("weight decay", 'optimizer.param_groups[0]["weight_decay"] = 0.1'),
    ("no momentum", 'optimizer.param_groups[0]["momentum"] = 0'),
    (
        "another group",
        "extra = torch.nn.Parameter(torch.ones({d}, device=p.device, dtype=p.dtype))\n"
        'optimizer.add_param_group({"params": [extra], "lr": 0.5})',
    ),
    (
        "an optimizer that looks at the classes of parameters",
        "class Own(torch.nn.Parameter):\n    rate = 0.5\n\nclass Careful(torch.optim.SGD):\n"
        "    @torch.no_grad()\n    def step(self):\n        for group in self.param_groups:\n"
        "            for each in group['params']:\n                if each.grad is not None:\n"
        "                    each.add_(each.grad, alpha=-each.rate if isinstance(each, Own) else -0.1)\n\n"
        "m.{l}.weight = Own(m.{l}.weight.detach())\noptimizer = Careful(m.parameters(), lr=0.1)",
    ),
    ("another optimizer", "optimizer = torch.optim.AdamW(m.parameters(), lr=0.01)"),
    ("its state is reset", "optimizer.state.clear()"),
    ("its state is loaded", "optimizer.load_state_dict(optimizer.state_dict())"),
    ("a step hook", 'optimizer.register_step_post_hook(lambda *args: p.event("{n}"))'),
    ("gradients are clipped", "torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1)"),
    ("a group loses a parameter", 'del optimizer.param_groups[0]["params"][0]'),
)

THREADS: Rows = (
    (
        "a thread trains beside it",
        "side = torch.nn.Linear({d}, {d}).to(p.device, p.dtype)\n"
        "thread = threading.Thread(target=lambda: side(torch.ones(2, {d}, device=p.device, dtype=p.dtype)).sum().backward())\n"
        'thread.start()\nthread.join()\np.value("beside", side.weight.grad)',
    ),
    (
        "a thread trains beside it in a hook",
        "side = torch.nn.Linear({d}, {d}).to(p.device, p.dtype)\n\n"
        "def beside(grad):\n"
        "    thread = threading.Thread(target=lambda: side(torch.ones(2, {d}, device=p.device, dtype=p.dtype)).sum().backward())\n"
        "    thread.start()\n    thread.join()\n\n"
        '{w}.register_hook(p.hook("{n}", beside))\nstep("with a thread", x)\np.value("beside", side.weight.grad)',
    ),
    (
        "the step runs in a thread",
        'thread = threading.Thread(target=step, args=("in a thread", x))\nthread.start()\nthread.join()',
    ),
    (
        "a hook is registered in a thread",
        'thread = threading.Thread(target=lambda: {w}.register_hook(p.hook("{n}")))\nthread.start()\nthread.join()',
    ),
    (
        "a hook trains something else",
        "side = torch.nn.Linear({d}, {d}).to(p.device, p.dtype)\n"
        '{w}.register_hook(p.hook("{n}", lambda grad: side(torch.ones(2, {d}, device=p.device, dtype=p.dtype)).sum().backward()))\n'
        'step("nested", x)\np.value("side", side.weight.grad)',
    ),
)

ERRORS: Rows = (
    (
        "a hook raises once",
        'def fail(grad):\n    handle.remove()\n    raise ValueError("on purpose")\n\n'
        'handle = {w}.register_hook(p.hook("{n}", fail))\n'
        'try:\n    step("fails", x)\nexcept ValueError as error:\n    p.value("raised", str(error))\n'
        'p.value("after", tuple(each.grad for each in m.parameters()))',
    ),
    (
        "an accumulation hook raises once",
        'def fail(each):\n    handle.remove()\n    raise ValueError("on purpose")\n\n'
        'handle = {w}.register_post_accumulate_grad_hook(p.hook("{n}", fail, kind="post_accumulate"))\n'
        'try:\n    step("fails", x)\nexcept ValueError as error:\n    p.value("raised", str(error))\n'
        'p.value("after", tuple(each.grad for each in m.parameters()))',
    ),
    (
        "a forward hook raises once",
        'def fail(*args):\n    handle.remove()\n    raise ValueError("on purpose")\n\n'
        "handle = m.{l}.register_forward_hook(fail)\n"
        'try:\n    step("fails", x)\nexcept ValueError as error:\n    p.value("raised", str(error))',
    ),
    (
        "a backward twice",
        "result = f(x).sum()\nwith p.backward():\n    result.backward()\n"
        'try:\n    with p.backward():\n        result.backward()\nexcept RuntimeError as error:\n    p.value("raised", "second time" in str(error))',
    ),
    (
        "an input that does not fit",
        'try:\n    step("does not fit", p.randn(2, {d} + 1))\nexcept RuntimeError as error:\n    p.value("raised", type(error).__name__)',
    ),
    (
        "a hook of wrong shape",
        "handle = {w}.register_hook(lambda grad: grad.sum())\n"
        'try:\n    step("wrong shape", x)\nexcept RuntimeError as error:\n    p.value("raised", type(error).__name__)\nhandle.remove()',
    ),
)

AREAS: dict[str, Rows] = {
    "hooks": HOOKS,
    "requires_grad": REQUIRES_GRAD,
    "parameters": PARAMETERS,
    "grads": GRADS,
    "modes": MODES,
    "inputs": INPUTS,
    "state": STATE,
    "optimizer": OPTIMIZER,
    "threads": THREADS,
    "errors": ERRORS,
}
"""By the name that a policy weighs."""
