"""Partitions that stand on disk for the next process: which are found again, and that they are the same.

Inductor's folder is a fresh one here, and its graphs are interpreted, so that no compiler runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn

from retrograd.aot import JointGraph, capture, partition_cache
from retrograd.aot.graph_files import FIELDS
from retrograd.backends.registry import AtenBackend, InductorBackend
from retrograd.events import counters
from retrograd.serialize import packed, unpacked
from unit.retrograd.aot.second_process import Program, in_a_new_process


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of partitions; empty."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(InductorBackend, "compile", AtenBackend.compile)
    torch._dynamo.reset()
    counters.clear()
    yield tmp_path / "retrograd"
    torch._dynamo.reset()


def counted() -> tuple[int, int, int]:
    """Hits, misses and refusals since they were asked for last."""
    kinds = ("hits", "misses", "refusals")
    found = tuple(counters.pop(f"kept_partition_{kind}", 0) for kind in kinds)
    return found[0], found[1], found[2]


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ x.t()).sum(0)


def two_outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.sin()
    return y.exp(), (y * 2).tanh()


def dropped(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 0.3).square()


def attention(x: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 1, 4, 6)
    return torch.nn.functional.scaled_dot_product_attention(q, q.cos(), q.sin(), is_causal=True)


def under_autocast(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ x.t()).float().softmax(-1)


def indexed(x: torch.Tensor) -> torch.Tensor:
    return x[:, 1:4].cumsum(-1)[..., ::2] * 3


def changed_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[0].mul_(2)
    return y.add_(1)


def viewing(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x * 2
    return y, y.view(6, 4)


def normalised() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def half_precision_loss(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (x * 2).to(torch.bfloat16)
    return torch.nn.functional.cross_entropy(logits.float(), torch.arange(4)), logits


PROGRAMS = [
    half_precision_loss,
    gelu,
    two_outputs,
    dropped,
    attention,
    under_autocast,
    indexed,
    changed_in_place,
    viewing,
]


@pytest.mark.parametrize("fn", PROGRAMS, ids=lambda fn: fn.__name__)
def test_a_second_process_computes_the_same_bits(fn: Program) -> None:
    first = in_a_new_process(fn)
    _, missed, refused = counted()
    second = in_a_new_process(fn)
    hit, _, refused_again = counted()
    assert (missed, refused_again) == (1, refused)
    assert hit == 1 - refused
    assert all(map(torch.equal, first, second))
    assert hit == (fn is not viewing)  # how a view is made again is a function, which no file holds


def test_numbers_that_are_drawn_again_are_the_same_in_a_second_process() -> None:
    first = in_a_new_process(dropped, partitioner="recompute_all")
    second = in_a_new_process(dropped, partitioner="recompute_all")
    assert counted() == (1, 1, 0)
    assert all(map(torch.equal, first, second))
    output, grad = second
    assert 0 < int((output == 0).sum()) < output.numel()
    assert torch.equal(output == 0, grad == 0)


def test_a_module_with_buffers_is_found_again() -> None:
    first, fresh = in_a_new_process(normalised()), counted()
    second, again = in_a_new_process(normalised()), counted()
    assert (fresh, again) == ((0, 1, 0), (1, 0, 0))
    assert all(map(torch.equal, first, second))


def test_what_is_found_can_be_differentiated_twice() -> None:
    in_a_new_process(gelu)
    torch._dynamo.reset()
    x = torch.randn(4, 6, dtype=torch.float32, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.compile(gelu, backend="retrograd")(x).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(gelu(x).sum(), x, create_graph=True)
    assert counted()[0] == 1
    (second,), (wanted,) = (torch.autograd.grad(one.square().sum(), x) for one in (grad, expected))
    torch.testing.assert_close(second, wanted)


def test_the_joint_graph_of_what_is_found_can_be_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "retrograd.aot.graph")
    shown = []
    for _ in range(2):
        caplog.clear()
        in_a_new_process(gelu)
        shown.append([one.getMessage() for one in caplog.records if "def joint(" in one.getMessage()])
    assert counted() == (1, 1, 0)
    assert len(shown[0]) == 1
    assert shown[0] == shown[1]


def other_constant(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x @ x.t(), approximate="tanh").sum(0)


def test_another_constant_is_another_partition() -> None:
    in_a_new_process(gelu)
    in_a_new_process(other_constant)
    assert counted() == (0, 2, 0)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch._functorch.config.patch(activation_memory_budget=0.5),
        lambda: torch._inductor.config.patch(fallback_random=True),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.backends.mkldnn.flags(enabled=False),
        lambda: default_dtype(torch.float64),
    ],
    ids=["partitioner", "inductor", "autocast", "mkldnn", "default dtype"],
)
def test_other_settings_are_another_partition(setting: Callable[[], Any]) -> None:
    in_a_new_process(gelu)
    with setting():
        in_a_new_process(gelu)
    assert counted() == (0, 2, 0)


def test_other_options_are_another_partition() -> None:
    in_a_new_process(gelu)
    in_a_new_process(gelu, partitioner="save_all")
    in_a_new_process(gelu, single_region=True)
    assert counted() == (0, 3, 0)


def layer(x: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return (x @ weights[name]).tanh()


def shared_by_two_layers() -> None:
    """Compile and train two layers that differ in names alone, in turn."""
    for name in "first", "second":
        results = []
        for fn in layer, torch.compile(layer, backend="retrograd"):
            torch.manual_seed(len(name))
            x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
            y = fn(x, {name: weight}, name)
            results.append([y, *torch.autograd.grad(y.square().sum(), [x, weight])])
        torch.testing.assert_close(*results)


def test_layers_that_differ_in_names_alone_share_a_partition() -> None:
    shared_by_two_layers()
    assert counted() == (1, 1, 0)


def test_a_shared_partition_has_the_names_of_its_own_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    read = partition_cache.read_partition
    monkeypatch.setattr(
        partition_cache, "read_partition", lambda *args: found.append(read(*args)) or found[-1]
    )
    shared_by_two_layers()
    (joint,) = (one.joint for one in found)
    names = [leaf.name for leaf in joint.state.leaves]
    assert [primal.name for primal in joint.primals] == names
    assert [primal.name for primal in joint.signature.primals] == names
    assert any("second" in name for name in names)


def test_what_has_no_name_is_not_kept(folder: Path) -> None:
    in_a_new_process(gelu, passes=[lambda gm, inputs: gm])
    in_a_new_process(gelu, partitioner=torch._functorch.partitioners.default_partition)
    held = torch.arange(6.0)
    in_a_new_process(lambda x: x * torch.tensor([1.0, 2, 3, 4, 5, 6]) + held)
    assert counted()[0] == 0
    assert not folder.exists() or all(len(list(part.iterdir())) == 1 for part in folder.iterdir())


def _power(x: torch.Tensor, n: float) -> torch.Tensor:
    return x.pow(n)


def _between(x: torch.Tensor, n: float) -> torch.Tensor:
    return torch.lerp(x, x.exp(), n)


@pytest.mark.parametrize("fn", [_power, _between])
def test_a_capture_for_the_value_of_a_number_is_not_kept(fn: Callable[[Any, float], torch.Tensor]) -> None:
    """Dynamo has specialised some of these values itself, before the capture."""
    compiled = torch.compile(fn, backend="retrograd", options={"strict": True})
    for value in (0.5, -0.5, 1.5, 2.0, 3.0, -1.0, 0.0):
        x, y = ((torch.arange(4.0) + 1).requires_grad_() for _ in range(2))
        got, want = compiled(x, value), fn(y, value)
        torch.testing.assert_close(got, want)
        got.sum().backward()
        want.sum().backward()
        torch.testing.assert_close(x.grad, y.grad)


def _only_file(folder: Path) -> Path:
    (found,) = folder.glob("*/*")
    return found


def change(file: Path, how: Callable[[Any, Any], object]) -> None:
    """Write the file again, its hash as well, after `how` has changed what it says."""
    read = [json.loads(piece) for piece in unpacked(file.read_bytes())]
    how(*read)
    file.write_bytes(packed({}, [json.dumps(piece).encode() for piece in read]))


@pytest.mark.parametrize("cut", [0, 1, 64, 65, 200, -1])
def test_a_truncated_file_is_written_again(folder: Path, cut: int) -> None:
    first = in_a_new_process(gelu)
    file = _only_file(folder)
    file.write_bytes(file.read_bytes()[:cut])
    assert all(map(torch.equal, first, in_a_new_process(gelu)))
    assert counted() == (0, 2, 0)
    assert all(map(torch.equal, first, in_a_new_process(gelu)))
    assert counted() == (1, 0, 0)


@pytest.mark.parametrize("entry", ["halves", "saved", "backwards", "examples", "out_spec"])
def test_a_foreign_file_is_not_used(folder: Path, entry: str) -> None:
    first = in_a_new_process(gelu)
    file = _only_file(folder)
    change(
        file,
        lambda head, graphs: (head if entry in head else head["body"]).update({entry: ["something", "else"]}),
    )
    assert all(map(torch.equal, first, in_a_new_process(gelu)))
    assert counted() == (0, 2, 0)


def test_a_part_that_is_read_as_another_graph_is_not_used(folder: Path) -> None:
    first = in_a_new_process(gelu)

    def other(head: Any, graphs: Any) -> None:
        head["body"]["halves"][0]["parts"][0][0][0]["nodes"][0][1] = "renamed"

    change(_only_file(folder), other)
    assert all(map(torch.equal, first, in_a_new_process(gelu)))
    assert counted() == (0, 2, 0)


def deep(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = (x @ x.t()).softmax(-1) @ x + x.sin()
    return x


DEEP = {"regions": 4, "partitioner": "save_all"}


def test_a_second_process_does_not_read_graphs_that_repeat_themselves(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = in_a_new_process(deep, **DEEP)
    assert counters["region_calls"] > counters["region_compiles"] > 0

    def none(head: Any, graphs: list[Any]) -> None:
        assert all(graphs)
        graphs.clear()

    change(_only_file(folder), none)
    monkeypatch.setattr("retrograd.aot.partition_file.capture", None)
    assert all(map(torch.equal, first, in_a_new_process(deep, **DEEP)))
    assert counted() == (1, 1, 0)


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_graph_is_read_or_captured_again_where_what_is_saved_lies_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_readable: bool
) -> None:
    first = in_a_new_process(deep, **DEEP)
    if not is_readable:
        change(_only_file(folder), lambda head, graphs: graphs.clear())
    transposed, captured = [], []

    def lies_otherwise(fake: Any, value: Any) -> Any:
        with fake.fake_mode:
            transposed.append(fake.mT.contiguous().mT)
        return transposed[-1]

    def noted(*args: Any, **options: Any) -> JointGraph:
        captured.append(args)
        return capture(*args, **options)

    monkeypatch.setattr("retrograd.aot.run.region.laid_out_like", lies_otherwise)
    monkeypatch.setattr("retrograd.aot.partition_file.capture", noted)
    assert all(map(torch.equal, first, in_a_new_process(deep, **DEEP)))
    assert counted() == (1, 1, 0)
    assert transposed
    assert len(captured) == (0 if is_readable else 1)


def test_a_second_process_does_not_hold_what_the_first_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrograd.aot.droppable.FEWEST_BYTES", 1)
    mask, held = torch.arange(24).view(4, 6) % 2 > 0, list[bool]()

    def gated(x: torch.Tensor) -> torch.Tensor:
        left, right = x.masked_fill(mask, 0.5).chunk(2, -1)
        return torch.nn.functional.silu(left) * right

    def derivatives(call: Program) -> list[torch.Tensor]:
        torch._dynamo.reset()
        x = torch.linspace(-1, 1, 24).view(4, 6).requires_grad_()
        inner = x * 1
        given = weakref.ref(inner)
        out = call(inner)
        del inner
        held.append(given() is not None)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return [first, *torch.autograd.grad(first.sin().sum(), x)]

    compiled = torch.compile(gated, backend="retrograd", options={"strict": True})
    want, *found = derivatives(gated), derivatives(compiled), derivatives(compiled)
    assert counted() == (1, 1, 0)
    assert held == [False, False, False]
    for one in found:
        torch.testing.assert_close(one, want)


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.write_text("in the way")
    in_a_new_process(gelu)
    assert counted()[2] == 1


def test_nothing_is_kept_where_inductor_keeps_nothing(folder: Path) -> None:
    with torch._inductor.config.patch(force_disable_caches=True):
        in_a_new_process(gelu)
    os.chmod(folder.parent, 0o777)
    in_a_new_process(gelu)
    assert counted() == (0, 0, 2)
    assert not folder.exists()


def test_no_unfinished_file_is_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("retrograd.aot.partition_cache.os.replace", full)
    in_a_new_process(gelu)
    assert list(folder.glob("*/*")) == []


def test_each_field_of_a_joint_graph_is_kept_or_refused() -> None:
    others = {"state", "gm", "primals", "out_spec", "gradients", "options"}
    refused = {"offsets_matter", "reports"}
    known = {*FIELDS, *others, *refused}
    assert {field.name for field in dataclasses.fields(JointGraph)} == known


def test_what_the_graph_writes_into_its_inputs_is_kept() -> None:
    def decayed(values: list[torch.Tensor]) -> None:
        for value in values:
            value.mul_(value.sin().exp() + 1)

    def in_a_new_process(regions: bool) -> list[torch.Tensor]:
        torch._dynamo.reset()
        values = [torch.arange(4.0) + i for i in range(12)]
        torch.compile(decayed, backend="retrograd", options={"strict": True, "regions": regions})(values)
        return values

    for regions in (True, False):
        counters.clear()
        first, second = in_a_new_process(regions), in_a_new_process(regions)
        assert all(map(torch.equal, first, second))
        assert [value._version for value in first] == [value._version for value in second] == [1] * 12
        assert counted() == (1, 1, 0)
