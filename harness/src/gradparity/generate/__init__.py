"""Programs drawn at random, as data.

In: a policy and a seed, or Hypothesis. Out: a `Script`: JSON, and one Python source that is executed.

    drawn("views", 7).source        the text
    body_of(drawn("views", 7))      what `observe` runs

`script.py` is the data, `draw.py` the way from a seed to a script, `policies.py` what is preferred, `tables`
and `kinds` the statements, `around` all that stands outside the compiled function.
"""

from gradparity.generate.draw import drawn
from gradparity.generate.load import body_of
from gradparity.generate.policies import POLICIES
from gradparity.generate.script import Script, Step

__all__ = ["POLICIES", "Script", "Step", "body_of", "drawn"]
