"""Hypothesis strategies: generated programs for tests of one's own, which Hypothesis draws and shrinks.

In: names of policies. Out: strategies of scripts.

    @given(programs("views", "mutation"))
    def test_my_backend(script):
        assert not judged(script, "compile:mine").is_find

A drawing takes all its choices from one `random.Random`; here that is Hypothesis's, so the same grammar
serves seeds and strategies. `aim` tells Hypothesis how many passes of a compiler a program made fire.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import hypothesis
from hypothesis import strategies as st

from gradparity.generate.chance import Chance
from gradparity.generate.draft import Rejected
from gradparity.generate.draw import draw, policy
from gradparity.generate.policies import POLICIES
from gradparity.generate.script import Script


def programs(*names: str) -> st.SearchStrategy[Script]:
    """Scripts of these policies, or of all. Raises UnknownNameError for a policy that does not exist."""
    chosen = [policy(name).name for name in names or tuple(POLICIES)]
    choices = st.randoms(use_true_random=False, note_method_calls=False)
    return st.builds(_drawn, st.sampled_from(chosen), choices)


def aim(fired: Mapping[str, int]) -> None:
    """Makes Hypothesis look for programs that make more passes fire. To be called inside a test."""
    hypothesis.target(float(len(fired)), label="passes that fired")


def _drawn(name: str, source: Random) -> Script:
    try:
        return draw(Chance(source), policy(name))[0]
    except Rejected:
        hypothesis.reject()
