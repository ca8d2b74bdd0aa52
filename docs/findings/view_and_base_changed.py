"""An intermediate and a view of it are given, and both are changed in place: the backend dies of an assertion.

Plain torch. `python view_and_base_changed.py [BACKEND …]`; exit status 1 if one of them differs from eager.
"""

import sys

import torch

BACKENDS = ("aot_eager",)


def program(compile):
    def forward(base, view):
        view.mul_(2)
        base.add_(1)

    x = torch.ones(2, 3, requires_grad=True)
    base = x * 2
    compile(forward)(base, base.t())
    base.sum().backward()
    return x.grad


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        alike = one.shape == other.shape and one.dtype == other.dtype
        return alike and torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and one == other


def outcome(backend):
    """What the program shows; for an exception its type, and its message's first line to be read."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    try:
        return program(
            (lambda f: f) if backend is None else (lambda f: torch.compile(f, backend=backend))
        ), ""
    except Exception as error:
        return f"raises {type(error).__name__}", (str(error) or " ").splitlines()[0][:120]


def differs(backend) -> bool:
    """Whether this backend shows something else than eager; says both."""
    expected, found = outcome(None), outcome(backend)
    verdict = "as eager" if same(expected[0], found[0]) else "DIFFERS"
    print(f"{backend}: {verdict}\n  eager    {expected}\n  {backend:<8} {found}", flush=True)
    return verdict == "DIFFERS"


if __name__ == "__main__":
    sys.exit(any([differs(backend) for backend in sys.argv[1:] or BACKENDS]))
