"""Do the structures of a session's backwards repeat?

In: each backward that was captured or met again. Out: whether the next one is worth capturing. To capture a
backward takes as long as the stock engine takes for ten or twenty, so a program whose graph is another one at
each step (a mixture of experts) is left to the engine. From time to time its graph is looked at, and once one
comes back, backwards are captured again.
"""

from __future__ import annotations

from collections import deque

from retrograd._torch.autograd import EngineRequest, names_of_nodes
from retrograd.errors import Reason
from retrograd.graph.backward_graph import BackwardGraph
from retrograd.live.capture.structure import first_difference
from retrograd.live.run.plan import Plan

#: so many new structures, each paid back by so many backwards of a known one, and nothing repeats.
MOST_NEW, PAYS_BACK = 12, 8

#: the graph of one backward in so many is looked at then, at first; and of how many it is remembered.
LOOKS, LOOKS_KEPT = 16, 32


class Repetition:
    """Counts the new structures of one session."""

    def __init__(self) -> None:
        self._reason: Reason | None = None
        self._spent = 0
        self._last: BackwardGraph | None = None
        self._looks, self._passed = LOOKS, 0
        self._seen: deque[int] = deque(maxlen=LOOKS_KEPT)

    def runs(self, plan: Plan) -> None:
        """A plan is about to run."""
        if plan.report.runs:
            self._spent = max(0, self._spent - 1)
            return
        graph = plan.report.graph
        if self._spent + PAYS_BACK > MOST_NEW * PAYS_BACK and self._last is not None:
            text = f"of the last backwards, {MOST_NEW} or more had a new structure"
            text = f"{text}: {first_difference(self._last, graph)}"
            plan.postpone(text)  # compiled only if it is met again
            self._reason = Reason("nothing-repeats", text, "live.capture", way_out=_WAY_OUT)
        self._last = graph
        self._spent = min(self._spent + PAYS_BACK, MOST_NEW * PAYS_BACK)

    def why_not(self, request: EngineRequest) -> Reason | None:
        """Why `request` is not worth capturing; None if structures repeat, as far as is known."""
        reason = self._reason
        if reason is None:
            return None
        self._passed += 1
        if self._passed < self._looks:
            return reason
        self._passed, names = 0, hash(names_of_nodes(request))
        if names not in self._seen:
            self._seen.append(names)
            return reason
        # If that was an error, the next time is far off.
        self._reason = self._last = None
        self._spent, self._looks = 0, self._looks * LOOKS
        self._seen.clear()
        return None


_WAY_OUT = "nothing to do: capturing would cost more than it saves; strict=True captures nevertheless"
