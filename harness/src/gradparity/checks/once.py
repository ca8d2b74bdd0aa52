"""`python -m gradparity.checks.once CASE SEED SUBJECT DEVICE`: one run of one case in a process of its own.

In: words on the command line. Out: one line of JSON with a fingerprint of everything observed.
"""

from __future__ import annotations

import json
import sys

import torch

from gradparity.case import Case
from gradparity.corpus.registry import program
from gradparity.observe import observe
from gradparity.outcome import Outcome, fingerprint
from gradparity.subjects.registry import resolve


def main(words: list[str]) -> None:
    """Runs the case and prints."""
    address, seed, subject, device = words
    found = program(Case.parse(address, int(seed)), torch.device(device))
    torch.set_num_threads(1)
    outcome = observe(found.case, found.body, resolve(subject), torch.float32, torch.device(device))
    sys.stdout.write(json.dumps(shown(outcome)) + "\n")


def shown(outcome: Outcome) -> dict[str, str]:
    """A fingerprint of each thing observed, by name."""
    found = {f"grad {item.name}": fingerprint(item.value) for item in outcome.grads}
    for place, value in enumerate(outcome.values):
        found[f"value {value.name} ({place})"] = fingerprint(value.value)
    found |= {f"state {item.name}": fingerprint(item.value) for item in outcome.state}
    for place, event in enumerate(outcome.events):
        found[f"event {place}"] = f"{event.kind} {event.site} {event.fingerprint}"
    found["log"] = fingerprint(outcome.log)
    found["raised"] = outcome.raised.type if outcome.raised is not None else ""
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
