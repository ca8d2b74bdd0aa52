"""A campaign on a Ray cluster of two nodes on this machine. Needs ray: `nox -s ray`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is an extra: nox -s ray runs these tests")
from ray.cluster_utils import Cluster  # noqa: E402 - only where ray is

from gradparity.campaign import Campaign, Plan, run  # noqa: E402
from gradparity.executors.ray_cluster import RayCluster  # noqa: E402
from gradparity.executors.registry import Resources  # noqa: E402
from gradparity.executors.unit import Finished, Lost, Result, Started, Unit  # noqa: E402
from gradparity.verdict import Verdict  # noqa: E402

NAME = "autograd_function_db"


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """A head without room for workers beside the controller, and two nodes with room for one each."""
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    made.add_node(num_cpus=1, num_gpus=1)
    made.add_node(num_cpus=1, num_gpus=1)
    made.wait_for_nodes()
    ray.init(address=made.address, log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def shown(campaign: Campaign) -> list[tuple[str, ...]]:
    return sorted((row.case, row.subject, row.verdict.value, row.symptom) for row in campaign.rows)


def plan(*subjects: str, **more: Any) -> Plan:
    resources = Resources(executor="ray", address="auto", gpus=0.5)
    return Plan(subjects, (NAME,), **{"processes": 2, "resources": resources, "timeout": 60.0} | more)


def slow(unit: Unit, emit: Any) -> bool:
    """Ten steps of a moment each; each tells its node."""
    import time

    for step in range(unit.start, 10):
        emit("start", step, {"case": f"{unit.payload['n']}.{step}"})
        time.sleep(0.3)
        emit("result", step, {"node": ray.get_runtime_context().get_node_id()})
    return True


def test_a_node_that_is_killed_in_the_middle_loses_nothing_and_nothing_counts_twice(cluster: Cluster) -> None:
    victim = next(iter(cluster.worker_nodes))
    results: list[tuple[int, int]] = []
    nodes = set()
    executor = RayCluster(slow, 2, None, 0.0, 10.0)
    messages = list_with_kill(executor.run([Unit({"n": n}, 30.0) for n in range(4)]), cluster, victim)
    for message in messages:
        assert not isinstance(message, Lost), message
        if isinstance(message, Result):
            results.append((message.unit.payload["n"], message.step))
            nodes.add(message.data["node"])
    assert sorted(results) == [(n, step) for n in range(4) for step in range(10)]
    assert len(nodes) == 2
    assert sum(isinstance(message, Finished) for message in messages) == 4
    assert any(isinstance(message, Started) for message in messages)


def list_with_kill(messages: Iterator[Any], cluster: Cluster, victim: Any) -> list[Any]:
    """All messages; the victim dies, without a word, once it has given three results."""
    name, found, given = victim.node_id, [], 0
    for message in messages:
        found.append(message)
        if isinstance(message, Result) and message.data["node"] == name:
            given += 1
            if given == 3:
                cluster.remove_node(victim, allow_graceful=False)
    assert given >= 3, "the node that should die was given nothing"
    return found


def test_a_campaign_gives_what_it_gives_locally_with_parts_of_a_gpu(cluster: Cluster) -> None:
    here = run(Plan(("eager", "planted:none-grad"), (NAME,), processes=0, limit_per_corpus=6))
    there = run(plan("eager", "planted:none-grad", limit_per_corpus=6))
    assert shown(there) == shown(here)
    assert there.completed == there.total


def test_a_case_that_kills_its_process_is_lost_alone(cluster: Cluster) -> None:
    result = run(plan("planted:exit", "planted:hang", "eager", limit_per_corpus=1, timeout=3.0))
    verdicts = {row.subject: row.verdict for row in result.rows}
    assert verdicts == {
        "planted:exit": Verdict.CRASH,
        "planted:hang": Verdict.TIMEOUT,
        "eager": Verdict.AGREE,
    }
    assert len(result.rows) == 3
