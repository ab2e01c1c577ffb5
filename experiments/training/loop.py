"""The loop over the steps of one recipe: rows, validations, checkpoints, bad steps."""

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from experiments.common import meshes
from experiments.common.memory import device_peak_bytes
from experiments.training import data, health, processes, speed
from experiments.training.bad_steps import (
    LOSSES,
    MOST_ROLLBACKS,
    BadStep,
    description,
    loss_limit,
    recent_losses,
)
from experiments.training.checkpoints import Checkpoints, Progress
from experiments.training.interrupts import Interrupts
from experiments.training.loads import loads
from experiments.training.rows import NoRows, RowLog
from experiments.training.runs import Log, Run
from experiments.training.settings import Recipe
from experiments.training.state import TrainState
from experiments.training.step_bar import StepBar
from experiments.training.tensorboard import Board
from experiments.training.trainer import Trainer

_PROFILED = range(2, 5)  # Steps of the process, counted from 0, that are profiled.


@dataclasses.dataclass(kw_only=True)
class Loop:
    """The training of one recipe, from a state after some steps to the last step.

    Attributes:
      run: The run.
      recipe: The recipe.
      trainer: The recipe's trainer.
      late_trainer: The trainer of the steps with BF16 matmuls at the end, if any.
      measure: A function that validates the state, and returns entries of a step's row.
      checkpoints: The recipe's checkpoints.
      logs: The logs of steps, of FP8 moments, and of reports of amax, saturation and
        underflow, by name.
      progress: The number of steps done, and other values that checkpoints store with a
        state.
      state: The state after these steps.
      batches: The iterator of the next batches.
      peak_before: The device's peak memory before this recipe was compiled, in bytes.
      profile: The folder for a profile of a few steps; None means no profile.
      board: The writer of rows for TensorBoard; None means no TensorBoard.
    """

    run: Run
    recipe: Recipe
    trainer: Trainer
    late_trainer: Trainer | None
    measure: Callable[[Trainer, TrainState], dict[str, float]]
    checkpoints: Checkpoints
    logs: Mapping[Log, RowLog | NoRows]
    progress: Progress
    state: TrainState
    batches: data.Batches
    peak_before: int | None
    profile: Path | None = None
    board: Board | None = None

    def __post_init__(self) -> None:
        self._losses = self._recent_losses()
        self._done = 0  # Steps of this process; the first is slower.
        self._bar = StepBar(
            self.recipe, self.run.steps, self.progress.step, enabled=processes.is_main()
        )

    def finish(self, stop: Interrupts) -> None:
        """Trains until the last step or a stop, and saves a checkpoint there.

        Raises:
          BadStep: If a step is bad and is neither skipped nor rolled back.
        """
        with self._bar, stop.deferred(), contextlib.ExitStack() as profiling:
            while self.progress.step < self.run.steps:
                self._profile(profiling)
                row = self._step()
                if row is None:
                    continue
                stopping, step = processes.anywhere(stop.made), self.progress.step
                due = self._is_due(self.run.settings.eval_every)
                if due and self._validate(row) == "rollback":
                    self._roll_back()
                    continue
                self._write("metrics", row)
                self._show(row)
                is_due = self._is_due(self.run.settings.save_every)
                if is_due or self.run.settings.bad_step != "rollback":
                    self.progress.origin, self.progress.rollbacks = step, 0
                if is_due or stopping:
                    self._save()
                if stopping:
                    return

    def _profile(self, profiling: contextlib.ExitStack) -> None:
        """Starts the profile before its first step, and ends it after its last step."""
        if self.profile is None:
            return
        if self._done == _PROFILED.start:
            profiling.enter_context(jax.profiler.trace(self.profile))
        elif self._done == _PROFILED.stop:
            profiling.close()
            tqdm.write(f"{self.recipe}: a profile is in {self.profile}")

    def _is_due(self, every: int) -> bool:
        step = self.progress.step
        return step == self.run.steps or step % every == 0

    def _step(self) -> dict[str, Any] | None:
        """Runs a step and returns its row, or None if the step caused a rollback."""
        step = self.progress.step + 1
        limit = loss_limit(self._losses, self.run.settings.spike)
        every = self.run.settings.health_every
        reporting = every is not None and step % every == 0
        trainer = self._trainer_of(step)
        # The first access to `reporting_step` compiles it, before the time is taken.
        run_step = trainer.reporting_step if reporting else trainer.step
        started = time.perf_counter()
        self.state, measured = run_step(self.state, next(self.batches), limit)
        row = {"recipe": self.recipe, "step": step}
        row["lr"] = self.trainer.learning_rate(step - self.progress.skipped)
        row["loss"] = float(measured.loss)
        if measured.grad_norms.size:
            row["grad_norm"] = float(measured.grad_norm)
        row |= loads(measured.routing)
        if self._done:
            self.progress.seconds += time.perf_counter() - started
            self.progress.timed_steps += 1
        self._done += 1
        if measured.ok:
            self._losses.append(row["loss"])
        else:
            line = description(measured, self.trainer.parameter_names, limit)
            if self._answer(step, line, "skipped") == "rollback":
                self._roll_back()
                return None
            self.progress.skipped += 1
            row["skipped"] = True
        for report in health.rows(measured.reports):
            self._write("health", {"recipe": self.recipe, "step": step} | report)
        self.progress.step = step
        return row

    def _trainer_of(self, step: int) -> Trainer:
        """Returns the trainer of a step, which is compiled."""
        if self.late_trainer is None or step <= self.run.early_steps(self.recipe):
            return self.trainer
        if "compiled" not in vars(self.late_trainer):
            tqdm.write(f"{self.recipe}, step {step}: matmuls in BF16 from here on")
            _ = self.late_trainer.compiled
        return self.late_trainer

    def _answer(self, step: int, problem: str, skip: str) -> str:
        """Prints and returns the reaction to a bad step: "skip" or "rollback".

        Args:
          step: The number of the step.
          problem: The problem, as the message says it.
          skip: The words of the message for "skip".

        Raises:
          BadStep: If the training must stop.
        """
        reaction, origin = self.run.settings.bad_step, self.progress.origin
        line = f"{self.recipe}, step {step}: {problem}"
        is_last = reaction == "rollback" and self.progress.rollbacks == MOST_ROLLBACKS
        if reaction == "stop" or is_last:
            raise BadStep(line)
        going_on = f"back to step {origin}" if reaction == "rollback" else skip
        tqdm.write(f"{line}; {going_on}")
        return reaction

    def _roll_back(self) -> None:
        """Restores the checkpoint of step `progress.origin`, except for its batches.

        A process that is killed before the next checkpoint resumes from this one, and
        reads the bad batch again.
        """
        step = self.progress.step = self.progress.origin
        self.progress.rollbacks += 1
        self.checkpoints.roll_back(step)
        for log in (*self.logs.values(), self.board):
            if log is not None:
                log.drop_after(step)
        self._losses = self._recent_losses()
        if step:
            self.state = self.checkpoints.state(self.trainer.abstract_state())
        else:
            self.state = self.trainer.init()

    def _recent_losses(self) -> deque[float]:
        def read() -> list[float]:
            rows = self.run.rows("metrics")
            rows_of_recipe = (row for row in rows if row["recipe"] == self.recipe)
            return list(recent_losses(rows_of_recipe))

        return deque(processes.on_main(read), maxlen=LOSSES)

    def _validate(self, row: dict[str, Any]) -> str | None:
        """Validates the state, and adds the results to `row`.

        Parameters may give NaN only for some inputs, which training may not read for a
        long time.

        Returns:
          The reaction to results that are not finite; None if all are finite.
        """
        trainer = self._trainer_of(row["step"])
        results, reaction = self.measure(trainer, self.state), None
        if bad := [f"{k} {v:.4g}" for k, v in results.items() if not math.isfinite(v)]:
            reaction = self._answer(row["step"], ", ".join(bad), "the training goes on")
        row |= results
        if reaction != "rollback":
            for moment_row in self.trainer.moment_rows(self.state):
                names = {"recipe": self.recipe, "step": row["step"]}
                self._write("moments", names | moment_row)
        return reaction

    def _write(self, log: Log, row: dict[str, Any]) -> None:
        """Writes a row to a log, and for TensorBoard if there is a writer."""
        self.logs[log].write(row)
        if self.board is not None:
            self.board.write(row)

    def _save(self) -> None:
        self.progress.rows = {log.name: log.sync() for log in self.logs.values()}
        self.progress.batches = self.batches.get_state()
        self.progress.note_peak(self.peak_before, device_peak_bytes())
        self.checkpoints.save(self.state, self.progress)

    def _show(self, row: dict[str, Any]) -> None:
        """Shows a row's loss and learning rate, the speed and the peak memory."""
        shown = {"loss": f"{row['loss']:.3f}", "lr": f"{row['lr']:.1e}"}
        if rate := self.progress.tokens_per_s(self.run.settings):
            shown["tokens/s"] = f"{rate:,.0f}"
            devices = meshes.devices(self.trainer.mesh)
            if devices > 1:
                shown["a device"] = f"{rate / devices:,.0f}"
            flops = self.progress.measured["flops_per_token"]
            if share := speed.utilization(rate, flops, devices):
                shown["MFU"] = f"{share:.1%}"
        if peak := device_peak_bytes():
            shown["peak"] = f"{peak / 2**30:.1f} GiB"
        self._bar.show(row["step"], shown)
