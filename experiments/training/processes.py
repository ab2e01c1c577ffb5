"""Processes that train together; only the main process writes and prints.

The processes run the same steps of the same program. Files and clocks may differ among
them, so decisions that depend on files or clocks are made by the main process, or by
all processes together.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost

AUTO = "auto"
_SHUTDOWN_S = 60  # Seconds that a process waits for the others before it ends.
_WORK_S = (
    24 * 3600
)  # Seconds that processes wait for one that reads data, for instance.
_waits = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """The processes of a run, as `jax.distributed.initialize` takes them.

    Attributes:
      count: The number of processes; None means that JAX finds all three values in the
        environment.
      index: The index of this process; 0 is the main process.
      coordinator: The address of the main process, as HOST:PORT.
    """

    count: int | None = None
    index: int | None = None
    coordinator: str | None = None

    @classmethod
    def of(
        cls, processes: str | None, index: int | None, coordinator: str | None
    ) -> "Cluster | None":
        """Returns the processes that the options name; None without any option.

        Args:
          processes: The value of `--processes`.
          index: The value of `--process-id`.
          coordinator: The value of `--coordinator`.

        Raises:
          ValueError: If options are missing or invalid.
        """
        alone = index is None and coordinator is None
        if processes is None and alone:
            return None
        if processes == AUTO and alone:
            return cls()
        if processes is None or not processes.isdecimal() or int(processes) < 1:
            raise ValueError(
                f"--processes must be {AUTO} alone, or a number of 1 or more with "
                f"--process-id and --coordinator; got {processes}"
            )
        count = int(processes)
        if index is None or coordinator is None:
            raise ValueError(
                f"--processes {count} needs --process-id and --coordinator"
            )
        if not 0 <= index < count:
            raise ValueError(
                f"--process-id must be at least 0 and below --processes {count}, got "
                f"{index}"
            )
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"--coordinator must be HOST:PORT, got {coordinator!r}")
        return cls(count=count, index=index, coordinator=coordinator)

    def join(self) -> None:
        """Connects this process to the others; only the main process prints from then.

        Raises:
          ValueError: If the environment names no processes, or they cannot be reached.
        """
        try:
            jax.distributed.initialize(
                self.coordinator,
                self.count,
                self.index,
                shutdown_timeout_seconds=_SHUTDOWN_S,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"--processes cannot connect: {reason}") from None
        if not is_main():
            sys.stdout.flush()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)


def leave() -> None:
    """Waits for the other processes and disconnects from them, if there are any."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def is_main() -> bool:
    """Returns whether this is the main process, which writes and prints."""
    return jax.process_index() == 0


def on_main[T](work: Callable[[], T]) -> T:
    """Runs `work` in the main process, and returns its result in all processes.

    Args:
      work: A function that returns a JSON value.

    Raises:
      OSError: If `work` raised it.
      ValueError: If `work` raised it.
    """
    if jax.process_count() == 1:
        return work()
    value = None
    with together():
        value = work() if is_main() else None
    return _gathered(value)[0]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raises an OSError or a ValueError of one process in all processes.

    All processes must enter this context.
    """
    if jax.process_count() == 1:
        yield
        return
    failure = None
    try:
        yield
    except (OSError, ValueError) as error:
        failure = error
    kind = OSError if isinstance(failure, OSError) else ValueError
    failures = _gathered(None if failure is None else [kind is OSError, str(failure)])
    if failure is not None:
        raise failure
    for is_os_error, message in filter(None, failures):
        raise (OSError if is_os_error else ValueError)(message)


def anywhere(flag: bool) -> bool:
    """Returns whether `flag` is true in any process."""
    if jax.process_count() == 1:
        return flag
    return bool(multihost_utils.process_allgather(np.array(flag)).any())


def _gathered(value: Any) -> list[Any]:
    """Returns the JSON values of all processes, in the order of their indices."""
    # Collectives on CPUs time out after half a minute; this wait does not.
    everyone = set(range(jax.process_count()))
    name = f"experiments.pretrain {next(_waits)}"
    multihost.sync_global_processes(name, timeout=_WORK_S, processes=everyone)
    encoded = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(encoded.size))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: encoded.size] = encoded
    rows = multihost_utils.process_allgather(padded)
    return [
        json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)
    ]
