"""One input is transposed, and rows are summed and used again: the values of all rows are mixed.

Plain torch. `python transposed_rows.py [BACKEND …]`; exit status 1 if one of them differs from eager.
"""

import sys

import torch

BACKENDS = ("inductor",)


def program(compile):
    def normalise(x, mean, scale, slope):
        rows, size = x.shape[0], x[0].numel()
        y = ((x.float().reshape(rows, 1, 1, size) - mean) * scale).reshape(x.shape)
        above = (x.float() >= y) | y.isnan()
        one, other = torch.where(above, 0.0, slope), torch.where(~above, 0.0, slope)
        total = (one * x.float()).reshape(rows, 1, size).sum(2)
        count = one.reshape(rows, 1, size).sum(2)
        r, m = scale.squeeze((2, 3)), mean.squeeze((2, 3))
        c = (count * m - total) * r * r * r * 0.1
        d = -c * m - count * r * 0.1
        parts = [one.reshape(rows, 1, 1, size) * r[:, :, None, None]]
        parts += [x.float().reshape(rows, 1, 1, size) * c[:, :, None, None], d[:, :, None, None]]
        return other + sum(parts).reshape(x.shape)

    x, mean, scale = torch.randn(8, 1, 4, 3).half(), torch.randn(8, 1, 1, 1), torch.rand(8, 1, 1, 1)
    slope = torch.randn(4, 3, 8, 1).permute(2, 3, 0, 1)
    return [compile(normalise)(x, mean, scale, slope)]


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
