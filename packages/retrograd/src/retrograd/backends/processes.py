"""Compile graphs in other processes while this one goes on.

In: graphs that this process will give to Inductor. Out: futures, and entries in Inductor's cache on disk.
Before this process compiles such a graph, it waits for the future, and finds the code there. A graph that no
process has begun with it compiles itself, as it does wherever one fails: no result depends on them.

Inductor lowers one graph after the other, on one thread, and waits for the kernels of each. A deep model is
several graphs, for each half the repeated layer and what stands around it.

Each process is served by a thread. All end when nothing was asked of them for a while, when one fails, and
with this process. A job carries Inductor's settings; a process refuses to work if what compiled code depends
on is not the same there. To load kernels it uses the devices, which takes some memory of them for as long.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, Pipe
from queue import SimpleQueue
from typing import Any

from torch import fx

from retrograd.backends.base import Answer, GraphKind
from retrograd.backends.inductor import (
    Portable,
    compile_graph,
    compile_threads,
    import_everything,
    patched,
    portable_settings,
    take_settings,
)
from retrograd.errors import Refusal, first_line
from retrograd.events import AOT_LOGS, counters
from retrograd.graph.calls import defining_modules
from retrograd.policy import FIRST_WORK, IDLE, LONGEST_WAIT, MOST_PROCESSES, WORKERS_EACH
from retrograd.process import ForkSafeLock, forgotten_by_reset
from retrograd.runtime.cuda import is_memory_scarce
from retrograd.serialize import Reader, Writer
from retrograd.trace import new_fake_mode

_log = AOT_LOGS["cache"]


#: settings under which Inductor runs kernels while it compiles, and chooses by their times. Beside other work
#: they are other times.
MEASURING = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "coordinate_descent_tuning",
    "benchmark_fusion",
    "benchmark_combo_kernel",
)


def job_of(gm: fx.GraphModule, inputs: Sequence[Any], half: GraphKind, settings: Mapping[str, Any]) -> bytes:
    """All that compiling `gm` needs, as data.

    Raises:
        TypeError: something cannot be written.
        ExportError: likewise, in the graph.
    """
    writer = Writer()
    job = {
        "document": writer.document(writer.graph(gm, inputs)),
        "half": asdict(replace(half, known_as=None)),  # it is sent before it has a name
        "settings": dict(settings),
        "modules": defining_modules(gm.graph),
    }
    return json.dumps(job).encode()


class _Processes:
    """Processes, and the threads of this one that talk to them.

    One process imports all that is needed, and forks the others, each for one connection.

    Attributes:
        settings: under which they compile; None until `start` has said so.
    """

    def __init__(self, count: int) -> None:
        self.settings: Portable | None = None
        self._waiting: SimpleQueue[tuple[bytes, Answer] | None] = SimpleQueue()
        #: jobs that were ever sent, and those that are not answered yet.
        self._sent = self._open = 0
        pipes = [Pipe() for _ in range(count)]
        self._connections = [ours for ours, _ in pipes]
        handles = [theirs.fileno() for _, theirs in pipes]
        code = f"from retrograd.backends.processes import fork_each; fork_each({handles})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(sys.path),
                # The other way to ask for devices uses them, and then the process could not be forked.
                "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
                "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, compile_threads() // count)),
                "TORCHINDUCTOR_WORKER_START": "fork",
            },
            pass_fds=handles,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for ours, theirs in pipes:
            theirs.close()
            threading.Thread(target=self._serve, args=(ours,), daemon=True).start()
        self._end_after(FIRST_WORK)

    @property
    def is_usable(self) -> bool:
        """Whether they run."""
        return self._process.poll() is None

    def send(self, job: bytes) -> Answer:
        """Have one of them begin with `job` as soon as it can. The caller holds `_changing`."""
        self._sent, self._open = self._sent + 1, self._open + 1
        self._waiting.put((job, answer := Answer()))
        return answer

    def abandon(self) -> None:
        """They are another process's."""
        for connection in self._connections:
            connection.close()

    def stop(self) -> None:
        """End them. What they have not done yet has failed."""
        with _changing:
            if self.is_usable:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
            for _ in self._connections:
                self._waiting.put(None)

    def _serve(self, connection: Connection) -> None:
        for job, answer in iter(self._waiting.get, None):
            try:
                if answer.set_running_or_notify_cancel():
                    connection.send((self.settings, job))
                    answer.set_result(connection.recv())
            except Exception as error:
                answer.set_result(first_line(error))
                self.stop()
            with _changing:
                self._open -= 1
                self._end_after(IDLE)
        connection.close()

    def _end_after(self, seconds: float) -> None:
        """End them after so many seconds, if nothing is asked of them until then."""
        sent = self._sent

        def end() -> None:
            with _changing:
                if sent == self._sent and not self._open:
                    self.stop()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()


#: those of this process, if there are any; and what is held while they are started, asked or ended.
_now: _Processes | None = None
_changing = ForkSafeLock()


def boot() -> None:
    """Graphs may be there in some seconds: have processes start, where there are processors enough."""
    global _now
    count = how_many()
    with _changing:
        if count and (_now is None or not _now.is_usable):
            try:
                _now = _Processes(count)
            except OSError as error:
                _log.info("no other process compiles: %s", first_line(error))


def start() -> None:
    """Graphs may be there soon: have processes ready, if what they need can be sent. It is called often."""
    if not how_many() or is_memory_scarce():
        return
    try:
        settings = portable_settings()
    except Exception as error:
        _log.info("no other process compiles: %s", first_line(error))
        return
    with _changing:
        if _now is not None and _now.settings not in (None, settings):
            stop()
        boot()
        if _now is not None:
            _now.settings = settings


def how_many() -> int:
    """How many processes this machine has room for."""
    if sys.platform != "linux" or not sys.executable:
        return 0
    return min(MOST_PROCESSES, compile_threads() // WORKERS_EACH)


@atexit.register
@forgotten_by_reset
def stop() -> None:
    """End all processes."""
    global _now
    with _changing:
        ended, _now = _now, None
        if ended is not None:
            ended.stop()


def begin(
    gm: fx.GraphModule, inputs: Sequence[Any], half: GraphKind, settings: Mapping[str, Any]
) -> Answer | None:
    """Have a process begin to compile `gm` as soon as one can; None if none will, which the log explains."""
    try:
        with _changing:
            if _now is None or not _now.is_usable or _now.settings is None:
                return None
            known = {**_now.settings["inductor"], **settings}
            if measuring := [name for name in MEASURING if known.get(name)]:
                raise Refusal("measuring", f"Inductor measures kernels under {', '.join(measuring)}")
            return _now.send(job_of(gm, inputs, half, settings))
    except Exception as error:
        _log.info("a graph is not sent to another process: %s", first_line(error))
        return None


def is_done(answer: Answer | None, *, once_begun: bool = False) -> bool:
    """Wait for another process; whether it has compiled the graph.

    Args:
        answer: of `begin`.
        once_begun: wait only if a process has begun with it; if none has, none will.
    """
    if answer is None or answer.is_of_parent or (once_begun and answer.cancel()):
        return False
    try:
        why = answer.result(LONGEST_WAIT)
    except Exception as error:
        why = first_line(error)
    if why is None:
        counters["compiled_elsewhere"] += 1
    else:
        _log.info("a graph is compiled here, not by another process: %s", why)
    return why is None


def _after_fork() -> None:
    global _now
    if _now is not None:
        _now.abandon()
    _now = None


os.register_at_fork(after_in_child=_after_fork)


# in the other process


def fork_each(handles: Sequence[int]) -> None:
    """Import what is needed, then have a process for each of the connections."""
    import_everything()
    for handle in handles:
        if os.fork() == 0:
            work(handle)
            return
    for handle in handles:
        os.close(handle)
    for _ in handles:
        os.wait()


def work(handle: int) -> None:
    """Do what comes through a connection, until it is closed."""
    is_ready = False
    with Connection(handle) as parent, contextlib.suppress(EOFError):
        while True:
            settings, job = parent.recv()
            try:
                if not is_ready:
                    _make_ready(settings)
                is_ready = True
                _work_on(json.loads(job))
                parent.send(None)
            except Exception as error:
                parent.send(first_line(error))


def _make_ready(settings: Portable) -> None:
    take_settings(settings)
    own = portable_settings()
    if other := [key for key in settings if settings[key] != own[key]]:
        raise Refusal("elsewhere", f"it has another {', '.join(other)}")


def _work_on(job: Mapping[str, Any]) -> None:
    for module in job["modules"]:
        importlib.import_module(module)
    reader = Reader(job["document"], new_fake_mode(False))
    gm = reader.graph(reader.body)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with patched(job["settings"]):
        compile_graph(gm, inputs, **job["half"])
