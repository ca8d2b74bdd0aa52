"""Every threshold by which retrograd decides what is worth its cost.

In: nothing. Out: constants; no result depends on them, only time and memory. A comment says what each was
chosen for.
"""

from __future__ import annotations

# repeated structure

#: the smallest repeated part that is compiled once, in autograd nodes. Below that, the extra call costs more
#: than the saved compilation.
SMALLEST_REPEAT = 16
#: the fewest copies of a repeated part. Two or three are compiled just as quickly in one piece.
FEWEST_COPIES = 4
#: calls of an ATen graph that an autograd node amounts to, forward or backward; and calls of a captured
#: backward: the node, its check, and a projection or two of each.
ATEN_CALLS_PER_NODE, CAPTURED_CALLS_PER_NODE = 3, 4
#: how many calls are compared together when periods are looked for: enough to tell the places in a layer
#: apart, and fewer than the calls of any layer that is worth a period of its own.
PERIOD_GRAM = 6
#: how many periods are tried on one stretch of calls.
PERIODS_TRIED = 6
#: what a byte costs that crosses a border and would not have been written to memory otherwise; one that is in
#: memory in any case costs 1. They are whole numbers, so that equal costs are equal.
UNFUSED_COST = 20

# compilation in other processes

#: calls of a graph from which on other processes take part. Fewer are compiled before these have begun.
WORTH_PROCESSES = 100
#: processes, at most; and how many of Inductor's own workers there must be for each.
MOST_PROCESSES, WORKERS_EACH = 4, 4
#: seconds that processes wait for the first work, and then for more; and that this process waits for one.
FIRST_WORK, IDLE, LONGEST_WAIT = 120, 15, 600
#: calls before the code of a whole graph takes the place of code in parts. Another process has compiled it by
#: then, even where a call takes few milliseconds.
CALLS_IN_PARTS = 2_000
#: the whole is begun after this part of the calls that come before the change.
WHOLE_BEGINS = 10

# failures

#: how often code may fail where eager does not, before it is given up.
MOST_FAILURES = 2
#: how many runs of Inductor's code are watched: to watch costs time, and what has run so often is proven.
WATCHED_RUNS = 8

# whether compiled code is worth it

#: a call is measured if it takes less than this many seconds: a backward; and a step, whose first call ran
#: eagerly in any case.
SHORT, SHORT_STEP = 0.02, 1.0
#: a step is steady after this many calls in a row without a compilation.
STEADY = 3
#: how many calls of each kind are measured.
SAMPLES = 6
#: calls between a measurement that speaks against the compiled code and the one that has to confirm it.
UNTIL_CONFIRMED = 50
#: how much slower than eager compiled calls may be.
TOLERANCE = 1.02

# CUDA graphs

#: calls that start kernels, at least, in a stretch that is recorded.
FEWEST_RECORDED = 2
#: calls that run as they are before one is recorded: they compile, choose kernels and make workspaces.
WARM_UPS = 2
#: recordings that are held, the ones used last: of a function whose results take much memory, and of others.
MOST_LARGE, MOST_RECORDINGS = 2, 4
#: bytes. Less is copied, if it comes from elsewhere each time, whatever a recording holds: an optimizer's
#: step gives no results, and reads a gradient for each parameter.
MUCH = 2**26
#: bytes. Smaller results are always copied: a loss is held until there is another one.
LITTLE = 2**16
#: recordings that are made at once. Their inputs come from other recordings than those of the others: several
#: layers share code. Or what all that fit have saved is held: the backward comes after several calls.
MOST_AT_ONCE = 64
#: so often does a function wait with its first recording because others run that are not warm: all that a
#: program repeats is to be recorded in the order in which it runs.
MOST_WAITS = 4
#: if after so many recordings less than one of `RARE` calls was a replay, there are none any more. The calls
#: between two recordings double each time: where inputs move, recording costs more than it saves.
TRIED, RARE = 5, 4
#: in so many replays we check whether what is copied comes from a recording by now.
FIRST_REPLAYS = 8
#: so often is a function recorded once more because others were recorded later and are called earlier. From
#: the first number on, it and its backwards have a pool of their own; from the second on, it runs as it is.
SEPARATE_POOL_AFTER, MOST_INVERSIONS = 8, 16
#: how many calls without a recording are remembered.
REMEMBERED = 4
#: sets of parameters and sizes that are remembered, the ones met last.
MOST_SETS = 256
#: sets of sizes, for one set of parameters, that are recorded.
MOST_SIZES = 16
#: where so many recordings are there, and were made for each of them, those that are gone have left gaps.
MANY, GAPS = 8, 1.25
#: one of so many recordings is made again now and then, because its inputs move.
FEW = 32
#: so many pools of a stream have memory that is given away. What is recorded while that is in use in all of
#: them lies in one more, where nothing is.
MOST_DONATING = 2
#: all is recorded once more when a program has come round so often with few new recordings, and in so many
#: rounds from then on, as soon as nobody holds results; at most so many times, unless the program grows.
QUIET, PATIENCE, MOST_TIDIED = 2, 4, 2

# reports and caches

#: how many backwards and graphs a report remembers, so that a long process does not grow without end.
KEPT_REPORTS = 200
#: modules of a model that takes longer to compile than processes to start.
DEEP = 50
