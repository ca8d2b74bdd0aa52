"""All thresholds for decisions about cost.

In: nothing. Out: constants. No result depends on them, only time and memory. A comment explains each choice.
"""

from __future__ import annotations

# repeated structure

#: The smallest repeated structure that is compiled once, in autograd nodes. Below that, the extra call costs
#: more than the saved compilation.
SMALLEST_REPEAT = 16
#: The minimum number of copies of a repeated structure. Two or three compile just as fast in one piece.
FEWEST_COPIES = 4
#: How many calls of an ATen graph correspond to one autograd node, forward or backward; and how many calls of
#: a captured backward: the node, its check, and a projection or two of each.
ATEN_CALLS_PER_NODE, CAPTURED_CALLS_PER_NODE = 3, 4
#: How many consecutive calls we compare when we search for periods: enough to distinguish positions in a
#: layer, and fewer than the calls of any layer that is worth a separate period.
PERIOD_GRAM = 6
#: How many periods we try on one stretch of calls.
PERIODS_TRIED = 6
#: The cost of a byte that crosses a border but would otherwise not have been written to memory. A byte that
#: is in memory anyway costs 1. Costs are integers, so that equal costs compare equal.
UNFUSED_COST = 20

# compilation in other processes

#: The graph size, in calls, from which other processes help. Smaller graphs compile before these have
#: started.
WORTH_PROCESSES = 100
#: The maximum number of processes; and how many of Inductor's own workers there must be for each.
MOST_PROCESSES, WORKERS_EACH = 4, 4
#: In seconds: how long a process waits for its first job and for each later one; and how long this process
#: waits for an answer.
FIRST_WORK, IDLE, LONGEST_WAIT = 120, 15, 600
#: Calls before whole-graph code replaces code of repeated parts. By then another process has compiled it,
#: even if a call takes only a few milliseconds.
CALLS_IN_PARTS = 2_000
#: We begin to compile the whole graph after one tenth of those calls (one in `WHOLE_BEGINS`).
WHOLE_BEGINS = 10

# backwards that request only some gradients

#: How many pruned graphs of one backward graph we compile. A pipeline needs two. If there would be more, the
#: code of the complete graph runs.
MOST_PRUNED = 8
#: How often in a row carried values may be unread, before we stop carrying them.
MOST_UNREAD = 2

# failures

#: How often code may fail where eager does not, before we give it up.
MOST_FAILURES = 2
#: How many runs of Inductor's code we watch for failures. Watching takes time; code that ran so often is
#: sound.
WATCHED_RUNS = 8

# whether compiled code is worth it

#: We measure a call only if it takes less than this many seconds: a backward, which takes longer than most if
#: its hooks run optimizers; and a step, whose first call ran eagerly in any case.
SHORT, SHORT_STEP = 0.08, 1.0
#: A step is steady after this many calls in a row without a compilation.
STEADY = 3
#: How many calls of each kind we measure; a multiple of six, see `specialize.profitability`.
SAMPLES = 6
#: Calls in eager between a measurement that finds compiled code slower and the one that must confirm it.
UNTIL_CONFIRMED = 50
#: How much slower than eager compiled calls may be.
TOLERANCE = 1.02

# CUDA graphs

#: The minimum number of calls that start kernels, for a stretch to be recorded.
FEWEST_RECORDED = 2
#: Calls that run unrecorded before a recording: they compile, choose kernels and allocate workspaces.
WARM_UPS = 2
#: How many recordings we hold, the most recently used: for a function with large results, and for others.
MOST_LARGE, MOST_RECORDINGS = 2, 4
#: In bytes. Inputs of up to this size in total are copied if their addresses keep changing, even if a
#: recording allocates little: an optimizer's step returns no results, and reads a gradient for each
#: parameter.
MUCH = 2**26
#: In bytes. Smaller results are always copied: a program holds a loss until there is a new one.
LITTLE = 2**16
#: Recordings that we make without delay. Either their inputs come from other recordings than those of the
#: existing ones, because several layers share code. Or the saved values of all recordings that fit are still
#: held, because the backward comes after several calls.
MOST_AT_ONCE = 64
#: How often a function postpones its first recording because other functions are not warm yet. We want to
#: record everything that a program repeats in the order in which it runs.
MOST_WAITS = 4
#: After this many recordings, if fewer than one in `RARE` calls was a replay, we stop recording. The number
#: of calls between two recordings doubles each time: if inputs move, recording costs more than it saves.
TRIED, RARE = 5, 4
#: For this many replays, we check whether a copied input now comes from a recording.
FIRST_REPLAYS = 8
#: How often a function is recorded again because others were recorded later but are called earlier. From the
#: first number on, the function and its backwards have a separate pool; from the second on, it runs
#: unrecorded.
SEPARATE_POOL_AFTER, MOST_INVERSIONS = 8, 16
#: How many calls without a recording we remember.
REMEMBERED = 4
#: How many sets of parameters and sizes we remember, the most recently met.
MOST_SETS = 256
#: How many sets of sizes we record for one set of parameters.
MOST_SIZES = 16
#: Recordings are out of order if there are at least `MANY`, and `GAPS` times as many were made: dropped ones
#: have left gaps, or their successors lie in further pools.
MANY, GAPS = 8, 1.25
#: In a quiet round, at most one recording in this many is new. A few are, because their inputs move.
FEW = 32
#: With this many pools, further recordings that find donated memory in use go into one that reuses none.
MOST_DONATING = 12
#: We record everything again after `QUIET` rounds of a program with few new recordings, and within `PATIENCE`
#: further rounds, as soon as nobody holds results; at most `MOST_TIDIED` times, unless the program grows.
QUIET, PATIENCE, MOST_TIDIED = 2, 4, 4

# reports and caches

#: How many backwards and graphs a report remembers, so that a long process does not grow without bound.
KEPT_REPORTS = 200
#: How many entries of one kind the short text of a report shows, so that it stays on one screen.
SHOWN_IN_SHORT = 3
#: How many autograd nodes of a segment a reason names: one of them may be given to ``opaque=``.
NAMED_NODES = 8
#: In seconds: when a compilation first says how far it is, and how often again; and when it says so once
#: although nobody has asked for it.
FIRST_PROGRESS, NEXT_PROGRESS, UNASKED_PROGRESS = 2, 5, 10
#: A model with this many modules takes longer to compile than worker processes take to start.
DEEP = 50
