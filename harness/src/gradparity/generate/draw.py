"""draw: from a seed, or from Hypothesis's choices, to a script that eager can run.

In: a policy's name and a seed. Out: always the same script. What eager rejects is counted in `attempt` and
drawn again; the errors that the grammar intends are no rejection.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from random import Random

import torch

from gradparity.case import Case
from gradparity.errors import CaseError, UnknownNameError
from gradparity.generate.chance import Chance
from gradparity.generate.draft import Draft, Rejected
from gradparity.generate.forms import FORMS
from gradparity.generate.intended import is_intended
from gradparity.generate.load import body_of
from gradparity.generate.policies import POLICIES
from gradparity.generate.policy import Policy
from gradparity.generate.script import Script
from gradparity.observe import Observed, numbers_of_python, observe
from gradparity.outcome import Outcome

ATTEMPTS = 25


def policy(name: str) -> Policy:
    """The policy of this name. Raises UnknownNameError."""
    if name not in POLICIES:
        raise UnknownNameError("policy", name, list(POLICIES))
    return POLICIES[name]


def drawn(name: str, seed: int) -> Script:
    """The script of this policy and seed. Raises CaseError if no attempt leads to one."""
    return drawn_and_run(name, seed)[0]


def drawn_and_run(name: str, seed: int) -> tuple[Script, Outcome]:
    """The script, and what eager showed when the drawing ended with a run of it, on the CPU with seed 0."""
    why = ""
    chosen = policy(name)
    place = seed * len(POLICIES) + list(POLICIES).index(name)
    for attempt in range(ATTEMPTS):
        try:
            chance = Chance(Random(f"{name}:{seed}:{attempt}"), place + attempt)
            script, outcome = draw(chance, chosen)
        except Rejected as error:
            why = str(error)
            continue
        return script.model_copy(update={"seed": seed, "attempt": attempt}), outcome
    raise CaseError(f"{name}:{seed}: {ATTEMPTS} drawings were rejected, the last because: {why}")


def draw(chance: Chance, chosen: Policy) -> tuple[Script, Outcome]:
    """One drawing, and eager's run of it. Raises Rejected if eager cannot run it."""
    draft = Draft(chance, chosen)
    try:
        with _own_state():
            script = FORMS[chosen.form](draft)
            outcome = run_in_eager(script)
    finally:
        draft.release()
    why = why_rejected(script, outcome)
    if why is not None:
        raise Rejected(why)
    return script, outcome


def run_in_eager(script: Script) -> Outcome:
    """What eager shows, on the CPU with seed 0. Raises Rejected if the script misuses the probe."""
    case = Case("generated", script.policy, script.seed)
    try:
        return observe(case, body_of(script), Observed(), torch.float32, torch.device("cpu"))
    except CaseError as error:
        raise Rejected(str(error)) from error


def why_rejected(script: Script, outcome: Outcome) -> str | None:
    """Why eager cannot run this script; None if it can, or raises what is intended."""
    raised = outcome.raised
    if raised is None or is_intended(raised, script.intends):
        return None
    return f"{raised.type}: {raised.message.splitlines()[0] if raised.message else ''}"


@contextmanager
def _own_state() -> Iterator[None]:
    """Drawing leaves torch's random numbers alone, draws the same in every process, and says nothing."""
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(numbers_of_python(0))
        stack.enter_context(warnings.catch_warnings())
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # flex_attention compiles itself
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield
