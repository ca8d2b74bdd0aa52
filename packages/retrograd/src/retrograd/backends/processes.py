"""Compile graphs in other processes while this one goes on.

In: graphs that this process will give to Inductor soon. Out: nothing but entries in Inductor's cache on disk.
When this process comes to such a graph, it waits for the other one, and finds the code there. A graph that no
process has begun with it compiles itself, as it does wherever one fails: no result depends on them.

Inductor lowers one graph after the other, on one thread, and waits for the kernels of each. A deep model is
several graphs, for each half the repeated layer and what stands around it.

Each process is served by a thread. It ends when nothing was asked of it for a while, and with this one. It is
sent Inductor's settings first, and refuses to work if what compiled code depends on is not the same there. To
load kernels it uses the devices, which takes some memory of them for as long.
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
from concurrent.futures import Future
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, Pipe
from queue import Empty, SimpleQueue
from typing import Any

from torch import fx

from retrograd._torch.cuda import is_memory_scarce
from retrograd._torch.inductor import (
    Portable,
    compile_graph,
    compile_threads,
    import_everything,
    patched,
    portable_settings,
    take_settings,
)
from retrograd._torch.operators import defining_modules
from retrograd._torch.trace import new_fake_mode
from retrograd.backends.base import Half
from retrograd.errors import Refusal, first_line
from retrograd.events import AOT_LOGS, counters
from retrograd.graph.lazy import LazyGraph
from retrograd.process import ForkSafeLock, forgotten_by_reset
from retrograd.serialize import Reader, Writer

_log = AOT_LOGS["cache"]

#: processes, at most; and how many of Inductor's own workers there must be for each.
MOST, WORKERS_EACH = 4, 4
#: seconds that a process waits for the first work, and then for more; and that this one waits for a process.
FIRST_WORK, IDLE, LONGEST = 120, 15, 600


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


#: of a process that was sent a graph: why it could not compile it, or None. An exception would hold the
#: frames of who waited for it, with their tensors, for as long as a thread knows of it.
Answer = Future[str | None]


def job_of(gm: fx.GraphModule, inputs: Sequence[Any], half: Half, settings: Mapping[str, Any]) -> bytes:
    """All that compiling `gm` needs, as data.

    Raises:
        TypeError: something cannot be written.
        ExportError: likewise, in the graph.
    """
    writer = Writer()
    job = {
        "document": writer.document(writer.graph(gm, inputs)),
        "half": asdict(replace(half, known_as=None)),  # it is announced before it has a name
        "settings": dict(settings),
        "modules": defining_modules(gm.graph),
    }
    return json.dumps(job).encode()


class _Processes:
    """Processes, and the threads of this one that talk to them.

    One process imports all that is needed, and forks the others, each for one connection.
    """

    def __init__(self, count: int) -> None:
        self.settings: Portable | None = None
        #: of what was announced.
        self._futures: dict[bytes, Answer] = {}
        self._waiting: SimpleQueue[tuple[bytes, Answer]] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        #: held while something is sent, and while a thread decides to end.
        self._sending = ForkSafeLock()
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
        for _, theirs in pipes:
            theirs.close()

    def start(self, settings: Portable) -> None:
        """Send the settings, and begin to work."""
        self.settings = settings
        serve = [threading.Thread(target=self._serve, args=(one,), daemon=True) for one in self._connections]
        self._threads += serve
        for thread in serve:
            thread.start()

    @property
    def is_usable(self) -> bool:
        """Whether anything that is announced will be begun."""
        return self.settings is None or bool(self._threads)

    @property
    def has_announced(self) -> bool:
        """Whether anything was announced that nobody has waited for."""
        return bool(self._futures)

    def send(self, job: bytes, settings: Mapping[str, Any]) -> Answer:
        """Have one of them begin with `job` as soon as it can.

        Raises:
            Refusal: none should, under these settings, or none will.
        """
        now = {**(self.settings or {}).get("inductor", {}), **settings}
        if measuring := [name for name in MEASURING if now.get(name)]:
            raise Refusal("measuring", f"Inductor measures kernels under {', '.join(measuring)}")
        future: Answer = Future()
        with self._sending:
            if not self.is_usable:
                raise Refusal("elsewhere", "they have ended")
            self._waiting.put((job, future))
        return future

    def announce(self, job: bytes, settings: Mapping[str, Any]) -> None:
        """Send `job`, for `wait_for`.

        Raises:
            Refusal: as `send`.
        """
        if job not in self._futures:
            self._futures[job] = self.send(job, settings)

    def wait_for(self, job: bytes) -> None:
        """Wait until `job` is done, if a process has begun with it; if none has, none will."""
        future = self._futures.pop(job, None)
        if future is None or future.cancel():
            return
        try:
            _wait_for(future)
        except Exception as error:
            _log.info("a graph is compiled here, not by another process: %s", first_line(error))

    def abandon(self) -> None:
        """They are another process's."""
        for connection in self._connections:
            connection.close()

    def stop(self) -> None:
        """End them."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _serve(self, connection: Connection) -> None:
        try:
            with connection:
                connection.send(self.settings)
                if why := connection.recv():
                    raise Refusal("elsewhere", why)
                while (sent := self._next()) is not None:
                    job, future = sent
                    if future.set_running_or_notify_cancel():
                        _compile(job, future, connection)
        except Exception as error:
            _log.info("a process that compiles has ended: %s", first_line(error))
        finally:
            self._end()

    def _next(self) -> tuple[bytes, Answer] | None:
        """What is to be done; None if nothing was sent for a while: the thread ends."""
        while True:
            try:
                return self._waiting.get(timeout=IDLE)
            except Empty:
                with self._sending:
                    if self._waiting.empty():
                        self._threads.remove(threading.current_thread())
                        return None

    def _end(self) -> None:
        """This thread ends. What waits when all have ended is not done."""
        with self._sending:
            if (me := threading.current_thread()) in self._threads:
                self._threads.remove(me)
            if self._threads:
                return
            self._futures.clear()
            while not self._waiting.empty():
                self._waiting.get()[1].cancel()
        self._process.wait()


def _compile(job: bytes, future: Answer, connection: Connection) -> None:
    """Have `job` done on the other side of the connection."""
    try:
        connection.send_bytes(job)
        future.set_result(connection.recv())
    except BaseException as error:
        future.set_result(first_line(error))
        raise


def _wait_for(future: Answer) -> None:
    """Wait until a process is done.

    Raises:
        Refusal: it could not compile the graph.
        TimeoutError, CancelledError: it takes too long; it was ended.
    """
    if why := future.result(LONGEST):
        raise Refusal("elsewhere", why)
    counters["compiled_elsewhere"] += 1


#: those of this process, if there are any; and what is held while they are started or ended.
_now: _Processes | None = None
_changing = ForkSafeLock()


def boot() -> None:
    """Graphs may be announced in some seconds: have processes start, where there are processors enough."""
    global _now
    count = how_many()
    with _changing:
        if count and _now is None:
            try:
                _now = _Processes(count)
            except OSError as error:
                _log.info("no other process compiles: %s", first_line(error))


def start() -> None:
    """Graphs may be announced soon: have processes ready, if what they need can be sent. It is called
    often."""
    if not how_many() or is_memory_scarce():
        return
    try:
        settings = portable_settings()
    except Exception as error:
        _log.info("no other process compiles: %s", first_line(error))
        return
    with _changing:
        if _now is not None and (not _now.is_usable or _now.settings not in (None, settings)):
            stop()
        boot()
        if _now is not None and _now.settings is None:
            _now.start(settings)


def how_many() -> int:
    """How many processes this machine has room for."""
    if sys.platform != "linux" or not sys.executable:
        return 0
    return min(MOST, compile_threads() // WORKERS_EACH)


@atexit.register
@forgotten_by_reset
def stop() -> None:
    """End all processes."""
    global _now
    with _changing:
        ended, _now = _now, None
        if ended is not None:
            ended.stop()


def announce(gm: fx.GraphModule, inputs: Sequence[Any], half: Half, settings: Mapping[str, Any]) -> None:
    """This process will soon compile `gm`: another one may begin."""
    try:
        if (now := _now) is not None:
            now.announce(job_of(gm, inputs, half, settings), settings)
    except Exception as error:
        _log.info("a graph is not sent to another process: %s", first_line(error))


def wait_for(gm: fx.GraphModule, inputs: Sequence[Any], half: Half, settings: Mapping[str, Any]) -> None:
    """Wait until another process is done with `gm`, if one has begun."""
    if (now := _now) is not None and now.has_announced:
        with contextlib.suppress(Exception):  # what cannot be written was not announced
            now.wait_for(job_of(gm, inputs, half, settings))


class Elsewhere:
    """A graph that another process compiles some time, if the settings are then what they are now.

    Args:
        graph, half, settings: as in `announce`.

    Raises:
        Exception: nothing is kept on disk under these settings, as in `portable_settings`.
    """

    def __init__(self, graph: LazyGraph, half: Half, settings: Mapping[str, Any]) -> None:
        self._graph, self._half, self._own = graph, half, settings
        self._settings = portable_settings()
        self._future: Answer | None = None
        self._process = os.getpid()

    def begin(self) -> None:
        """Have a process begin as soon as one can.

        Raises:
            Refusal: none will.
            Exception: as `job_of` and `portable_settings`.
        """
        self._check()
        start()
        if (now := _now) is None or now.settings != self._settings:
            raise Refusal("elsewhere", "no other process can be started")
        job = job_of(self._graph.gm, self._graph.summary.inputs, self._half, self._own)
        self._future = now.send(job, self._own)

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            Refusal: it was not, or what was compiled is for other settings than those of now.
            Exception: as `_wait_for`.
        """
        self._check()
        if self._future is None or self._process != os.getpid():
            raise Refusal("elsewhere", "it was begun in the process that has forked this one")
        _wait_for(self._future)

    def _check(self) -> None:
        now = portable_settings()
        if other := [key for key in now if now[key] != self._settings[key]]:
            raise Refusal("elsewhere", f"settings have changed since: {', '.join(other)}")


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
    with Connection(handle) as parent, contextlib.suppress(EOFError):
        if not parent.poll(FIRST_WORK):
            return
        settings = parent.recv()
        try:
            take_settings(settings)
            own = portable_settings()
            other = [key for key in settings if settings[key] != own[key]]
            parent.send(f"it has another {', '.join(other)}" if other else None)
        except Exception as error:
            parent.send(first_line(error))
        while True:
            job = parent.recv_bytes()
            try:
                _work_on(json.loads(job))
                parent.send(None)
            except Exception as error:
                parent.send(first_line(error))


def _work_on(job: Mapping[str, Any]) -> None:
    for module in job["modules"]:
        importlib.import_module(module)
    reader = Reader(job["document"], new_fake_mode(False))
    gm = reader.graph(reader.body)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with patched(job["settings"]):
        compile_graph(gm, inputs, **job["half"])
