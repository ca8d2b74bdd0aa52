"""Errors that depend on values and that the program catches, under Dynamo and `retrograd.aot`."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import linalg
from torch.utils.checkpoint import checkpoint

import retrograd

ONE, NINE = torch.ones(2, 2), torch.tensor([9])
SINGULAR = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
NAN = torch.full((2, 2), float("nan"))


@torch.library.custom_op("test_handlers::checked", mutates_args=())
def checked(x: torch.Tensor) -> torch.Tensor:
    if x.sum() < 0:
        raise KeyError("negative")
    return x.clone()


checked.register_fake(torch.empty_like)


def asserted(x):
    assert (x < 0).all(), "it is negative"
    return x


def cholesky(x):
    return linalg.cholesky(x * -ONE)


OPERATORS = {
    "cholesky": cholesky,
    "old cholesky": lambda x: torch.cholesky(x * -ONE),
    "inv": lambda x: linalg.inv(x * SINGULAR),
    "solve": lambda x: linalg.solve(x * SINGULAR, ONE),
    "lu_factor": lambda x: linalg.lu_factor(x * SINGULAR)[0],
    "ldl_factor": lambda x: linalg.ldl_factor(x * 0 * ONE)[0],
    "svd": lambda x: linalg.svd(x * NAN)[1],
    "pinv": lambda x: linalg.pinv(x * NAN),
    "eigvals": lambda x: linalg.eigvals(x * NAN).real,
    "lu_solve": lambda x: linalg.lu_solve(x * ONE, NINE.int().expand(2), ONE),
    "quantize": lambda x: torch.fake_quantize_per_channel_affine(
        x * ONE, ONE[0], NINE.int().expand(2), 0, 0, 3
    ),
    "divide a number": lambda x: x * (3 // (NINE - 9)),
    "divide a truth": lambda x: x * (torch.tensor([True]) % (NINE - 9)),
    "divide down": lambda x: x * torch.div(3, NINE - 9, rounding_mode="trunc"),
    "numpy": lambda x: x * torch.from_numpy((x * ONE).numpy()),
    "index": lambda x: (x * ONE)[NINE],
    "index_select": lambda x: (x * ONE).index_select(0, NINE),
    "gather": lambda x: (x * ONE).gather(0, torch.tensor([[9, 9]])),
    "take": lambda x: (x * ONE).take(NINE),
    "scatter": lambda x: (x * ONE).scatter(0, NINE[None], x[None, None]),
    "index_add": lambda x: (x * ONE).index_add(0, NINE, x * ONE[:1]),
    "index_put": lambda x: (x * ONE).index_put((NINE,), x),
    "embedding": lambda x: F.embedding(NINE, x * ONE),
    "embedding_bag": lambda x: F.embedding_bag(NINE, x * ONE, torch.tensor([0])),
    "one_hot": lambda x: x * F.one_hot(NINE, 3),
    "cross_entropy": lambda x: F.cross_entropy(x * ONE, torch.tensor([0, 7])),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x * ONE, torch.tensor([0, 7])),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x * ONE * 9, ONE),
    "multinomial": lambda x: x * torch.multinomial(-ONE, 1),
    "bernoulli": lambda x: x * torch.bernoulli(ONE * 7),
    "normal": lambda x: x * torch.normal(ONE, -ONE),
    "whole division": lambda x: x * (torch.tensor([3]) // torch.tensor([0])),
    "masked_scatter": lambda x: (x * ONE).masked_scatter(ONE > 0, torch.ones(1)),
    "custom operator": lambda x: checked(x * -ONE),
    "assertion": asserted,
}

DOORS = {
    "dynamo": lambda fn: torch.compile(fn, backend="retrograd", options={"backend": "eager"}),
    "aot": lambda fn: retrograd.aot.function(fn, backend="eager"),
}


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()


def outcome(call):
    torch.manual_seed(0)
    x = torch.tensor(1.5, requires_grad=True)
    try:
        result = call(x)
        result.backward()
    except Exception as error:
        return type(error), str(error)
    return result.item(), x.grad.item()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_error_of_values_reaches_its_handler(name, door):
    operator = OPERATORS[name]

    def fn(x):
        try:
            result = operator(x)
        except Exception:
            result = x * 5
        return result.sum()

    assert outcome(DOORS[door](fn)) == (7.5, 5.0)


def with_clauses(x):
    try:
        with torch.no_grad():
            return cholesky(x).sum()
    except (ValueError, linalg.LinAlgError):
        return x * 2


def of_another_class(x):
    try:
        return cholesky(x).sum()
    except (KeyError, TypeError):
        return x * 3


def suppressed(x):
    with contextlib.suppress(RuntimeError):
        return cholesky(x).sum()
    return x * 4


@contextlib.contextmanager
def swallowing():
    try:
        yield
    except RuntimeError as error:
        str(error)


def swallowed(x):
    with swallowing():
        return cholesky(x).sum()
    return x * 5


def returned_in_finally(x):
    try:
        return F.embedding(NINE, x * ONE)
    finally:
        return x * 6  # noqa: B012, SIM107


def in_the_caller(x):
    try:
        return swallowing_nothing(x)
    except RuntimeError:
        return x * 7


def swallowing_nothing(x):
    try:
        return cholesky(x).sum()
    except KeyError:
        return x


def retried(x):
    for jitter in (0.0, 1.0, 5.0):
        try:
            return linalg.cholesky(x * ONE - ONE + jitter * torch.eye(2)).sum()
        except linalg.LinAlgError:
            continue
    return x


def in_an_else(x):
    try:
        y = x * 2
    except RuntimeError:
        y = x * 9
    else:
        y = cholesky(y)
    return y.sum()


def in_a_handler(x):
    try:
        try:
            raise ValueError
        except ValueError:
            return cholesky(x).sum()
    except RuntimeError:
        return x * 8


def in_a_checkpoint(x):
    try:
        return checkpoint(cholesky, x, use_reentrant=False).sum()
    except RuntimeError:
        return x * 9


def in_vmap(x):
    try:
        return torch.func.vmap(cholesky)(x[None]).sum()
    except RuntimeError:
        return x * 10


def raised_as_another(x):
    try:
        return cholesky(x).sum()
    except RuntimeError as error:
        raise KeyError("another") from error


FORMS = [
    with_clauses, of_another_class, suppressed, swallowed, returned_in_finally, in_the_caller, retried,
    in_an_else, in_a_handler, in_a_checkpoint, in_vmap, raised_as_another,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("fn", FORMS)
def test_whatever_catches_it(fn, door):
    assert outcome(DOORS[door](fn)) == outcome(fn)


def test_a_finally_runs_once_and_in_its_place():
    log = []

    def fn(x):
        log.append("before")
        try:
            return cholesky(x).sum()
        finally:
            log.append("finally")

    with pytest.raises(linalg.LinAlgError):
        DOORS["dynamo"](fn)(torch.tensor(1.5))
    assert log == ["before", "finally"]


def test_a_break_says_why():
    fast = torch.compile(with_clauses, backend="retrograd", options={"backend": "eager"}, fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="the program catches errors here"):
        fast(torch.tensor(1.5))


def test_a_staged_function_says_where():
    fn = retrograd.aot.function(retried, backend="eager", strict=True)
    with pytest.raises(
        retrograd.CaptureError, match=r"test_except_clauses.py:\d+ catches errors of aten"
    ) as raised:
        fn(torch.tensor(1.5, requires_grad=True))
    assert raised.value.reason.code == "error-caught"


STRICT = {
    "dynamo": lambda fn: torch.compile(fn, backend="retrograd", options={"backend": "eager"}, fullgraph=True),
    "aot": lambda fn: retrograd.aot.function(fn, backend="eager", strict=True),
}


@pytest.mark.parametrize("door", STRICT)
def test_other_clauses_and_managers_of_torch_do_not_matter(door):
    def fn(x):
        try:
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                return F.embedding(torch.tensor([1]), x * ONE).sum()
        except (KeyError, TypeError):
            return x * 3
        finally:
            pass

    assert outcome(STRICT[door](fn)) == outcome(fn)


def test_without_keeping_eager_dynamo_decides():
    fast = torch.compile(
        with_clauses, backend="retrograd", options={"backend": "eager", "stock_dynamo": True}
    )
    with pytest.raises(linalg.LinAlgError):
        fast(torch.tensor(1.5))
    assert torch.is_grad_enabled()


def without_a_handler(x):
    with torch.no_grad():
        return cholesky(x).sum() * x


@pytest.mark.parametrize("way", ["backend", "compile"])
def test_an_error_in_a_graph_leaves_grad_mode_as_it_was(way):
    """Eager's block switches it back. A graph of Dynamo's that runs as it is has no block."""
    if way == "backend":
        run = torch.compile(without_a_handler, backend="retrograd", options={"backend": "eager"})
    else:
        run = retrograd.compile(without_a_handler, backend="eager")
    for _ in range(2):
        with pytest.raises(linalg.LinAlgError):
            run(torch.tensor(1.5, requires_grad=True))
        assert torch.is_grad_enabled()
