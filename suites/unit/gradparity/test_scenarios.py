"""The scenarios themselves: each runs in eager, twice, with the same outcome, and leaves nothing behind."""

from __future__ import annotations

import inspect

import pytest
import torch

from gradparity.case import Case
from gradparity.corpus import coverage, scenarios
from gradparity.corpus.scenario import registered
from gradparity.observe import observe
from gradparity.outcome import Outcome, fingerprint, tensors_of
from gradparity.subjects.eager import Eager

SCENARIOS = registered()

# The least number of scenarios of an area; 20 where none is given.
LEAST = {"3": 6, "10": 5, "11": 120, "12": 15, "training": 15}

# What every library adds to a node or a tensor stays with it; these are the switches that could leak.
SWITCHES = (
    torch.is_grad_enabled,
    torch.is_anomaly_enabled,
    torch.is_inference_mode_enabled,
    lambda: torch.is_autocast_enabled("cpu"),
    torch._C._current_graph_task_id,
    torch._C._len_torch_dispatch_stack,
    torch._C._len_torch_function_stack,
    torch._C._autograd._saved_tensors_hooks_is_enabled,
    lambda: len(torch.nn.modules.module._global_backward_hooks),
    lambda: len(torch.nn.modules.module._global_backward_pre_hooks),
)


@pytest.fixture(autouse=True)
def single_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(name: str, dtype: torch.dtype = torch.float32) -> Outcome:
    case = Case("scenarios", name)
    return observe(case, SCENARIOS[name].body, Eager("eager"), dtype, torch.device("cpu"))


def seen(outcome: Outcome) -> list[object]:
    """All that must repeat, in a form that compares; not warnings, some of which torch gives only once."""
    records = [*outcome.grads, *outcome.values]
    return [
        [(event.site, event.kind, event.fingerprint) for event in outcome.events],
        [(record.name, fingerprint(record.value)) for record in records],
        [[tensor.strides for tensor in tensors_of(record.value)] for record in records],
        None if outcome.raised is None else (outcome.raised.type, outcome.raised.message),
    ]


@pytest.mark.parametrize("name", SCENARIOS)
def test_eager_runs_it_alike_and_as_its_tags_say(name):
    """All that is asked of a scenario, of three runs: there are nearly a thousand scenarios."""
    item, before = SCENARIOS[name], [switch() for switch in SWITCHES]
    outcome = run(name)
    assert seen(outcome) == seen(run(name)), "a second run shows something else"
    assert outcome.grads or outcome.values or outcome.events or outcome.raised, "it shows nothing"
    assert (outcome.raised is not None) == ("errors" in item.tags), outcome.raised
    if item.fp64:
        double = run(name, torch.float64)
        assert [event.site for event in outcome.events] == [event.site for event in double.events]
        assert (outcome.raised and outcome.raised.type) == (double.raised and double.raised.type)
    assert [switch() for switch in SWITCHES] == before, "it leaves a switch set"


def test_every_area_has_its_scenarios():
    counted = {area: len(names) for area, names in coverage.by_area(SCENARIOS).items()}
    assert {area: count for area, count in counted.items() if count < LEAST.get(area.split()[0], 20)} == {}
    assert len(SCENARIOS) >= 400


def test_every_scenario_is_about_something():
    assert coverage.outside(SCENARIOS) == []


@pytest.mark.parametrize("name", coverage.by_area(SCENARIOS)["training scripts"])
def test_training_scripts_have_a_timeline_of_several_steps(name):
    events = [event.site for event in run(name).events]
    assert len(events) > len(set(events)) > 0


def test_every_public_function_of_a_topic_is_registered_under_its_name():
    for topic in scenarios.TOPICS:
        functions = inspect.getmembers(topic, inspect.isfunction)
        own = {name for name, fn in functions if fn.__module__ == topic.__name__ and not name.startswith("_")}
        rows = [item for item in SCENARIOS.values() if item.body.__module__ == topic.__name__]
        assert own or rows
        assert own <= SCENARIOS.keys(), topic.__name__


def test_docstrings_are_one_sentence():
    for name, item in SCENARIOS.items():
        assert item.doc.endswith("."), name
        assert "\n" not in inspect.getdoc(item.body), name


def test_issues_are_references():
    for name, item in SCENARIOS.items():
        assert item.issue is None or item.issue.removeprefix("pytorch#").isdecimal(), name


def test_bodies_are_short():
    for name, item in SCENARIOS.items():
        assert len(inspect.getsource(item.body).splitlines()) <= 32, name


def test_table_names_existing_scenarios():
    words = {word.strip(",") for word in scenarios.__doc__.split("Not here")[0].split()}
    named = {word for word in words if word.count("_") >= 2 and word.isidentifier()}
    assert len(named) > 40
    assert named <= SCENARIOS.keys()
