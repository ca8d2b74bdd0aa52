"""The table of speed: its rows hang together, its measurements measure, its file is read and merged."""

from __future__ import annotations

import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import aot_subjects, host_time, kernels, measure, models, speed, speed_table, subjects, turns
from benchmarks.figures import Machine, Measured, Ratio, Table, TableError, merged
from benchmarks.growth import allocated_bytes, growth
from benchmarks.real_models import MODELS
from benchmarks.render import quantity, render, worst_steady
from benchmarks.speed_goals import GOALS
from benchmarks.speed_rows import PARTS, Part, chosen
from benchmarks.steps import compiled_otherwise, first_step, steady, training
from benchmarks.subjects import MissingOptionError
from benchmarks.trained_models import TRAINED
from benchmarks.training import WAYS
from benchmarks.training_table import COMPARISONS, ratios

MACHINE = Machine("cpu", "a processor", "2.13.0", "3.12.0", 2)
FIRST4 = {
    "first4:retrograd": Measured({"retrograd-inductor": 2.0}, "s", "one"),
    "first4:stock-default": Measured({"stock-inductor": 20.0}, "s", "one"),
}


def of_file(path: Path, **parts: Measured) -> Path:
    path.write_text(Table(MACHINE, dict(parts), {}, [path.stem]).to_json())
    return path


# rows and goals


def test_parts_have_ids_of_their_own() -> None:
    assert len({part.id for part in PARTS}) == len(PARTS)


def test_titles_tell_goals_apart() -> None:
    for device in ("cpu", "cuda"):
        titles = [goal.title for goal in GOALS if device in goal.devices]
        assert len(set(titles)) == len(titles)


def test_every_goal_compares_parts_that_are_measured_where_it_is() -> None:
    parts = {part.id: part for part in PARTS}
    for goal in GOALS:
        for figure in (goal.over, goal.under):
            assert set(goal.devices) <= set(parts[figure.partition("/")[0]].devices), goal.title


@pytest.mark.parametrize("part", PARTS, ids=[part.id for part in PARTS])
def test_every_part_can_be_called(part: object) -> None:
    measurement = (measure.MEASUREMENTS | speed_table.IN_TURNS)[part.measurement]
    inspect.signature(measurement).bind(**part.arguments)
    if part.measurement in ("training", "in_turns", "together"):
        assert part.arguments["model"] in TRAINED
        assert {*part.arguments.get("ways", [part.arguments.get("subject")])} <= {*WAYS}
        return
    assert part.arguments["model"] in {*models.WORKLOADS, *MODELS} if "model" in part.arguments else True
    named = part.arguments.get("subjects", [part.arguments.get("subject", "eager")])
    known = host_time.SUBJECTS if part.measurement == "host_time" else subjects.SUBJECTS
    assert set(named) <= {*known, *aot_subjects.SUBJECTS}


def test_rows_and_parts_are_chosen_by_name_and_pattern() -> None:
    assert [part.id for part in chosen("cpu", ["warm12"])] == ["warm12:retrograd", "warm12:stock-static"]
    assert [part.id for part in chosen("cpu", ["*12:retrograd", "warm12"])] == [
        "host12:retrograd",
        "warm12:retrograd",
        "warm12:stock-static",
    ]
    assert chosen("cpu", ["first48"]) == []


def test_a_row_that_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError, match="no row 'frist12'"):
        chosen("cpu", ["frist12"])


def test_asv_tracks_ratios_of_both_devices() -> None:
    assert {title.rpartition(" ")[2] for title in speed.RATIOS} == {"(cpu)", "(cuda)"}


# the file


def test_a_file_is_read_as_it_was_written() -> None:
    table = Table(MACHINE, dict(FIRST4), {"first4:stock-static": "the run's time was over"}, ["a note"])
    assert Table.of_json(table.to_json()) == table


def test_a_ratio_says_whether_its_goal_is_met() -> None:
    [ratio] = Table(MACHINE, dict(FIRST4)).ratios()
    assert (ratio.value, ratio.goal.at_most, ratio.is_met) == (0.1, 0.2, True)


def test_a_yardstick_divides_each_figure_by_that_of_its_own_process() -> None:
    parts = {
        "host-chain:retrograd": Measured({"eager": 2.0, "retrograd": 6.0}, "s", "one"),
        "host-chain:stock": Measured({"eager": 1.0, "stock": 12.0}, "s", "one"),
    }
    [ratio] = Table(MACHINE, parts).ratios()
    assert (ratio.value, ratio.over, ratio.under) == (0.25, 6.0, 12.0)


def test_merged_files_are_one_table_that_says_what_is_from_two_runs(tmp_path: Path) -> None:
    ours = of_file(tmp_path / "a", **{"first4:retrograd": FIRST4["first4:retrograd"]})
    stocks = of_file(
        tmp_path / "b", **{"first4:stock-default": replace(FIRST4["first4:stock-default"], run="two")}
    )
    table = merged([ours, stocks])
    assert (list(table.parts), table.notes) == (["first4:retrograd", "first4:stock-default"], ["a", "b"])
    assert [ratio.runs for ratio in table.ratios()] == [("one", "two")]
    assert "| 0.10† | ≤ 1/5 | yes | 2 s | 20 s |" in render(table)


def test_what_was_measured_later_is_no_longer_missing(tmp_path: Path) -> None:
    first = tmp_path / "a"
    first.write_text(Table(MACHINE, {}, {"first4:retrograd": "failed", "growth:x": "failed"}).to_json())
    table = merged([first, of_file(tmp_path / "b", **FIRST4)])
    assert table.missing == {"growth:x": "failed"}


def test_files_of_two_machines_are_not_merged(tmp_path: Path) -> None:
    other = tmp_path / "b"
    other.write_text(Table(replace(MACHINE, torch="2.11.0")).to_json())
    with pytest.raises(TableError, match="two machines"):
        merged([of_file(tmp_path / "a", **FIRST4), other])


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(143.2, "s", "143 s"), (0.0056, "s", "5.6 ms"), (3.1e-6, "s", "3.1 µs"), (2**21, "B", "2 MiB")],
)
def test_a_figure_has_a_unit_that_suits_it(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_the_worst_case_is_found() -> None:
    steadies = [goal for goal in GOALS if goal.at_most == 1.05][:2]
    ratios = [Ratio(goal, over, 1.0, "s", ("one",)) for goal, over in zip(steadies, (1.0, 1.2), strict=True)]
    assert worst_steady(ratios) is ratios[1]


# the program


def test_a_part_whose_package_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = replace(MODELS["gpt2"], package="no_such_package")
    monkeypatch.setitem(speed_table.NEEDED, "gpt2", absent)
    [part] = chosen("cpu", ["gpt2-first:retrograd"])
    assert speed_table.Run("one", "cpu").measure(part) == "not present: no_such_package is not installed"


def test_no_part_starts_when_the_time_is_over(tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    assert speed_table.main(["--device", "cpu", "--rows", "growth", "--seconds", "0", "--out", str(out)]) == 1
    assert set(Table.of_json(out.read_text()).missing.values()) == {"the run's time was over"}


def test_a_row_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [part] = chosen("cpu", ["sweep-small:live"])
    settings = {"subjects": ["eager", "retrograd-eager"], "model": "tiny", "rounds": 5}
    monkeypatch.setattr(speed_table, "chosen", lambda device, rows: [replace(part, arguments=settings)])
    out = tmp_path / "table.json"
    assert speed_table.main(["--device", "cpu", "--rows", "one", "--note", "tiny", "--out", str(out)]) == 0
    table = Table.of_json(out.read_text())
    assert (table.machine.torch, table.notes) == (torch.__version__, ["tiny"])
    assert set(table.parts["sweep-small:live"].figures) == {
        "eager step",
        "eager backward",
        "retrograd-eager step",
        "retrograd-eager backward",
    }


def test_what_retrograd_ran_eagerly_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "compiled_otherwise", lambda asked: ["a reason"])
    with pytest.raises(measure.CompiledOtherwiseError, match="a reason"):
        measure.main("first_backward", '{"subject": "eager", "model": "tiny"}')


def test_cuda_graphs_that_were_not_replayed_are_no_figure() -> None:
    asked = '{"subject": "retrograd-inductor-cudagraphs"}'
    assert any("no CUDA graph was replayed" in reason for reason in compiled_otherwise(asked))


# the measurements


def test_a_first_step_is_timed() -> None:
    assert first_step("retrograd-compile-eager", "tiny") > 0


def test_steady_subjects_take_turns_with_models_of_their_own() -> None:
    names = ["eager", "retrograd-compile-eager", "stock-compile-aot_eager", "retrograd-eager"]
    seconds = steady(names, "tiny", rounds=5)
    assert list(seconds) == [f"{name} {kind}" for name in names for kind in ("step", "backward")]
    assert min(seconds.values()) > 0


@pytest.mark.parametrize("name", ["retrograd-compile-eager", "retrograd-eager"])
def test_a_subject_trains_the_model_that_it_was_given(name: str) -> None:
    program, reference = models.workload("tiny"), models.workload("tiny")
    training(name, program, "cpu").step()
    reference.loss().backward()
    for ours, eager in zip(program.model.parameters(), reference.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, eager.grad)


@pytest.mark.parametrize("subject", ["retrograd", "stock"])
def test_host_time_is_that_of_a_backward_that_computes_nothing(subject: str) -> None:
    figures = host_time.host_time(subject, "tiny", rounds=5)
    assert figures["nodes"] == host_time.node_calls(models.workload("tiny").loss())
    assert 0 < figures[subject] < 1


def test_nodes_of_a_backward_are_counted_once_each() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    assert host_time.node_calls(y.sin() + y.cos()) == 5  # add, sin, cos, mul, the leaf


def test_growth_counts_before_and_after() -> None:
    counts = growth("retrograd-eager", "tiny", warm=3, steps=3)
    assert list(counts) == ["bytes before", "objects before", "bytes after", "objects after"]


def test_what_is_allocated_is_counted() -> None:
    before = allocated_bytes("cpu")
    held = torch.ones(1 << 20)
    assert allocated_bytes("cpu") - before >= held.nbytes
    assert allocated_bytes("cpu") - before < held.nbytes + (1 << 20)


def test_the_time_of_kernels_is_what_ran_on_the_device() -> None:
    trace = [
        {"cat": "cpu_op", "dur": 100},
        {"cat": "kernel", "dur": 20},
        {"cat": "gpu_memset", "dur": 3},
        {"name": "a mark"},
    ]
    assert kernels.device_seconds(trace) == pytest.approx(23e-6)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_model_of_a_library_gives_a_loss(name: str) -> None:
    pytest.importorskip("transformers", reason="the models are defined there")
    program = models.workload(name)
    loss = program.loss()
    loss.backward()
    assert loss.shape == ()
    assert any(parameter.grad is not None for parameter in program.model.parameters())


def test_an_option_that_retrograd_does_not_have_is_refused() -> None:
    with pytest.raises(MissingOptionError, match="no option 'telepathy'"):
        subjects.retrograd_with("eager", telepathy=True)


# training


def trained_by(**steps: float) -> Table:
    """A table in which GPT-2 was trained on a GPU, in so many seconds a step by each way."""
    parts = {
        f"train-gpt2:{way.replace('_', '-')}": Measured({"warm step": step, "warm fallbacks": 0.0}, "", "one")
        for way, step in steps.items()
    }
    return Table(replace(MACHINE, device="cuda"), parts)


def test_the_best_of_ours_is_compared_with_the_best_of_stock() -> None:
    table = trained_by(
        stock=2.0,
        stock_reduce_overhead=1.0,
        retrograd_compile=4.0,
        retrograd_reduce_overhead=3.0,
        retrograd_live=0.5,
        retrograd_step=5.0,
    )
    assert ratios(table, COMPARISONS[0]) == {"gpt2": 0.5}
    text = render(table)
    assert "| gpt2 | 2e+03 | 1e+03 | 4e+03 | 3e+03 | 500 | 5e+03 |" in text
    assert "| steady step, best of ours / best of stock | 0.50 | ≤ 0.95 | 0.50 (gpt2) | ≤ 1.02 | 1 |" in text
    assert "compile / stock compile | 2.00 |  | 2.00 (gpt2) | ≤ 1.02, **not met** | 1 |" in text


def test_what_was_measured_in_turns_counts_before_what_single_processes_say() -> None:
    table = trained_by(stock=2.0, retrograd_compile=4.0)
    figures = {"stock step": 1.0, "stock of stock": 1.0, "stock low": 1.0, "stock high": 1.0}
    ours = {"step": 0.9, "of stock": 0.9, "low": 0.85, "high": 0.95}
    figures |= {f"retrograd-compile {name}": value for name, value in ours.items()}
    table.parts["turns-gpt2:cuda"] = Measured(figures, "", "one")
    assert ratios(table, COMPARISONS[1]) == {"gpt2": 0.9}
    assert "| gpt2 | 1.00 (1.00–1.00) | 0.90 (0.85–0.95) |" in render(table)
    one_process = {"stock step": 1.0, "retrograd-compile step": 0.8}
    table.parts["together-gpt2:step"] = Measured(one_process, "", "one")
    assert ratios(table, COMPARISONS[1]) == {"gpt2": 0.8}


def test_a_group_with_a_way_that_was_not_measured_is_not_compared() -> None:
    assert ratios(trained_by(stock=2.0, retrograd_compile=1.0), COMPARISONS[0]) == {}


def test_figures_of_two_processes_are_told_apart() -> None:
    assert speed_table._flat({"cold": {"step": 2.0}, "warm": {"step": 1.0}}) == {
        "cold step": 2.0,
        "warm step": 1.0,
    }
    assert speed_table._flat({"cold": 2.0, "warm": 1.0}) == {"cold": 2.0, "warm": 1.0}


def test_what_fell_back_is_marked() -> None:
    table = trained_by(stock=2.0, retrograd_compile=1.0)
    table.parts["train-gpt2:retrograd-compile"].figures["warm fallbacks"] = 2.0
    assert r"| 1e+03\* |" in render(table)


@pytest.mark.slow
def test_ways_take_turns_and_one_that_fails_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", reason="the model is one of transformers")
    found = turns.in_turns("gpt2", ["eager", "on foot", "retrograd-live"], rounds=2, steps=2)
    assert {name.rpartition(" ")[0] for name in found} == {"eager", "retrograd-live"}
    assert found["eager step"] >= found["eager least"] > 0
    assert "KeyError: 'on foot'" in capfd.readouterr().err


def test_rounds_are_compared_with_the_same_round_of_stock() -> None:
    found = turns._summary([[2.0, 2.0], [30.0, 30.0]], [[1.0, 1.0], [10.0, 10.0]])
    assert found == {"step": 16.0, "least": 2.0, "of stock": 2.5, "low": 2.25, "high": 2.75}


def test_ways_take_turns_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []

    class Training:
        def __init__(self, way: str, model: str, device: str) -> None:
            self.way = way

        def step(self) -> float:
            order.append(self.way)
            return {"eager": 4.0, "stock-like-eager": 2.0}[self.way]

    monkeypatch.setattr("benchmarks.training.Training", Training)
    found = turns.together("gpt2", ["eager", "stock-like-eager"], rounds=2, steps=1)
    assert found["eager step"] == 4.0
    assert (found["eager of stock"], found["stock-like-eager of stock"]) == (2.0, 1.0)
    turn = 1 + turns.AWAKENING
    assert order == ["eager"] * turn + ["stock-like-eager"] * 2 * turn + ["eager"] * turn


@pytest.mark.slow
@pytest.mark.parametrize("way", ["eager", "retrograd-live", "retrograd-step"])
def test_a_step_of_training_is_measured(way: str) -> None:
    pytest.importorskip("transformers", reason="the model is one of transformers")
    found = measure.training(way, "gpt2", seconds=0.1)
    assert found["step"] > 0
    assert found["fallbacks"] == 0


def test_a_run_may_choose_the_ways_that_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def in_turns(ways: list[str], **arguments: object) -> dict[str, float]:
        asked.append(ways)
        return {}

    monkeypatch.setitem(speed_table.IN_TURNS, "in_turns", in_turns)
    part = Part("turns-x", "cpu", "in_turns", {"ways": [*WAYS], "model": "x"})
    for ways in ((), ("stock", "eager")):
        speed_table.Run("one", "cpu", ways=ways).measure(part)
    assert asked == [[*WAYS], ["eager", "stock"]]
