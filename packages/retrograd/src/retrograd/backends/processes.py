"""Compiles graphs in other processes while this one continues.

In: graphs that this process will give to Inductor. Out: futures, and entries in Inductor's cache on disk.
Before this process compiles such a graph, it waits for the future, and then finds the code in the cache. It
compiles a graph itself if no process has started on it, or if one has failed. So no result depends on other
processes.

Inductor lowers graphs one at a time, on one thread, and waits for the kernels of each. A deep model consists
of several graphs: the repeated layer and the code around it, for the forward and for the backward.

A thread serves each process. Processes exit after an idle timeout, when one of them fails, or when this
process exits. A job carries Inductor's settings. A worker refuses the job if something else that compiled
code depends on differs there. It uses the devices to load kernels, and holds some of their memory meanwhile.
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
from retrograd.graph.operator_effects import defining_modules
from retrograd.policy import FIRST_WORK, IDLE, LONGEST_WAIT, MOST_PROCESSES, WORKERS_EACH
from retrograd.process import ForkSafeLock, forgotten_by_reset
from retrograd.runtime.cuda import is_memory_scarce
from retrograd.serialize import Reader, Writer
from retrograd.trace import new_fake_mode

_log = AOT_LOGS["cache"]


#: settings under which Inductor times kernels while it compiles, and chooses by the times. Other work on the
#: machine changes these times.
MEASURING = (
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
    "coordinate_descent_tuning",
    "benchmark_fusion",
    "benchmark_combo_kernel",
)


def job_of(gm: fx.GraphModule, inputs: Sequence[Any], half: GraphKind, settings: Mapping[str, Any]) -> bytes:
    """Everything that is needed to compile `gm`, serialised.

    Raises:
        TypeError: something cannot be serialised.
        ExportError: something in the graph cannot be serialised.
    """
    writer = Writer()
    job = {
        "document": writer.document(writer.graph(gm, inputs)),
        "half": asdict(replace(half, known_as=None)),  # we send it before it has a name
        "settings": dict(settings),
        "modules": defining_modules(gm.graph),
    }
    return json.dumps(job).encode()


class _Processes:
    """The worker processes, and the threads of this process that serve them.

    One process imports what is needed, and forks the workers, one for each connection.

    Attributes:
        settings: under which they compile; None until `start` sets them.
    """

    def __init__(self, count: int) -> None:
        self.settings: Portable | None = None
        self._waiting: SimpleQueue[tuple[bytes, Answer] | None] = SimpleQueue()
        #: how many jobs were ever sent; how many are not answered yet.
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
                # The other way to ask for devices initialises them, and then the process could not fork.
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
        """Whether they are running."""
        return self._process.poll() is None

    def send(self, job: bytes) -> Answer:
        """Have a worker compile `job` as soon as one is free. The caller holds `_changing`."""
        self._sent, self._open = self._sent + 1, self._open + 1
        self._waiting.put((job, answer := Answer()))
        return answer

    def abandon(self) -> None:
        """Close the connections, without ending the workers: they belong to the parent process."""
        for connection in self._connections:
            connection.close()

    def stop(self) -> None:
        """End the workers. Their unfinished jobs fail."""
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
        """End the workers after so many seconds, unless new jobs arrive."""
        sent = self._sent

        def end() -> None:
            with _changing:
                if sent == self._sent and not self._open:
                    self.stop()

        timer = threading.Timer(seconds, end)
        timer.daemon = True
        timer.start()


#: the workers of this process, or None; and the lock for starting, asking and ending them.
_now: _Processes | None = None
_changing = ForkSafeLock()


def boot() -> None:
    """Start workers, if there are enough processors: graphs may follow in some seconds."""
    global _now
    count = how_many()
    with _changing:
        if count and (_now is None or not _now.is_usable):
            try:
                _now = _Processes(count)
            except OSError as error:
                _log.info("no other process compiles: %s", first_line(error))


def start() -> None:
    """Have workers ready, if our settings can be sent to them: graphs may follow soon. Called often."""
    settings = None if is_memory_scarce() else usable_settings()
    if settings is None:
        return
    with _changing:
        if _now is not None and _now.settings not in (None, settings):
            stop()
        boot()
        if _now is not None:
            _now.settings = settings


def usable_settings() -> Portable | None:
    """Our settings; None if there is no room for workers, or if the settings cannot be sent to them."""
    try:
        return portable_settings() if how_many() else None
    except Exception as error:
        _log.info("no other process compiles: %s", first_line(error))
        return None


def how_many() -> int:
    """How many workers this machine has room for."""
    if sys.platform != "linux" or not sys.executable:
        return 0
    return min(MOST_PROCESSES, compile_threads() // WORKERS_EACH)


@atexit.register
@forgotten_by_reset
def stop() -> None:
    """End all workers."""
    global _now
    with _changing:
        ended, _now = _now, None
        if ended is not None:
            ended.stop()


def begin(
    gm: fx.GraphModule, inputs: Sequence[Any], half: GraphKind, settings: Mapping[str, Any]
) -> Answer | None:
    """Have a worker compile `gm` as soon as one is free. None if no worker will; the log says why."""
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
    """Wait for a worker. Returns whether it has compiled the graph.

    Args:
        answer: the result of `begin`.
        once_begun: wait only if a worker has started on the graph. If not, we cancel the job.
    """
    if answer is None or answer.process != os.getpid() or (once_begun and answer.cancel()):
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


# in the worker


def fork_each(handles: Sequence[int]) -> None:
    """Import what is needed, then fork a worker for each connection."""
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
    """Compile the jobs that arrive on a connection, until it is closed."""
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
