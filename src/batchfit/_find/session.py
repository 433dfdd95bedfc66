"""What one search has besides its options: the runner of trials, the budget, and what is known already.

Rules:
- Nothing touches the device before the workload and the resume file have been read.
- Ranks compare their settings, take the smallest budget of any rank, and share rank 0's resume file.
- A search of an earlier run goes on within what is free now.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import torch

from batchfit._engine.device.device import Device, usable_bytes
from batchfit._engine.device.resolve import device_to_run
from batchfit._engine.device.tensors import ram_bytes
from batchfit._engine.distributed.ranks import Everyone, Ranks
from batchfit._engine.store.key import rank_digest
from batchfit._engine.trial.factory import Factory
from batchfit._engine.trial.in_children import InChildren
from batchfit._engine.trial.in_process import InProcess
from batchfit._engine.trial.trial import TrialRunner
from batchfit._files import locked
from batchfit._find.pure.options import FindOptions
from batchfit._find.pure.search import Search, SharedBudget
from batchfit._find.recall import Recall, recall
from batchfit._find.resume import ResumeFile
from batchfit._units import format_bytes
from batchfit.results import Trial
from batchfit.workload import Workload, as_workload

log = logging.getLogger("batchfit")


@final
@dataclass(frozen=True, slots=True)
class OwnTrials:
    """A target that runs its trials in a way of its own, a program's command for one.

    `compared`: what a search that goes on must have in common with it, besides the options. `digest`: its key
    in the store, where its answers are kept; `fresh`: what is stored is replaced. `caveats` says what the
    trials at a size did not show.
    """

    runner: TrialRunner
    compared: Mapping[str, Any] = field(default_factory=dict)
    digest: str | None = None
    fresh: bool = False
    caveats: Callable[[int], tuple[str, ...]] = lambda size: ()


FindTarget = Workload | Callable[[int], object] | Callable[[], object] | str | OwnTrials


@final
@dataclass(slots=True)
class FindSession:
    """A search that is about to run on all ranks."""

    options: FindOptions
    ranks: Ranks
    runs: TrialRunner
    search: Search  # as the options say, or as the resume file holds it; within its budget
    begun_s: float
    file: ResumeFile | None = None
    trials: list[Trial] = field(default_factory=list)  # of earlier runs
    own: OwnTrials | None = None

    @classmethod
    def open(
        cls,
        target: FindTarget,
        options: FindOptions,
        ranks: Ranks,
        everyone: Everyone,
        stack: contextlib.ExitStack,
        *,
        begun_s: float,
    ) -> FindSession:
        """Read the workload and the resume file, and agree with the other ranks; `stack` closes both."""
        own = target if isinstance(target, OwnTrials) else None
        here = own is None and not options.isolate
        work = as_workload(target) if here else None
        factory = Factory.of(target) if own is None and options.isolate else None
        if work is not None:
            options.check_key(has_model=work.model is not None)
            if work._by_tokens:
                options = options.within(*work._source.sampler.bounds())
        file = None if options.resume is None else ResumeFile(options.resume)
        search = options.search(costly_trials=own is not None)
        compared = {
            "budget": options.budget_bytes,
            "steps": options.steps,
            "soak_steps": options.soak_steps,
            "torch": torch.__version__,
            "world_size": ranks.world_size,
            **({} if own is None else own.compared),
        }
        text = ""
        if file is not None and ranks.is_main:
            stack.enter_context(locked(file.path))
            text = file.read(search, compared)
        everyone.meet()
        runs: TrialRunner
        if own is not None:
            runs = own.runner
        elif factory is not None:
            device = str(options.device) if type(options.device) is int else options.device
            children = InChildren(factory, device=device, timeout_s=options.timeout_s, ranks=ranks)
            runs = stack.enter_context(children)
        else:
            assert work is not None
            runs = InProcess(work, device_to_run(work._held, options.device))
        session = cls(options, ranks, runs, search, begun_s, file, own=own)
        session._agree()
        session._resume(text, compared)
        session._warn_of_undeclared_state()
        if session.search.ask() is not None:
            runs.rehearse(ranks, session.search.sizes.to_rehearse())
        return session

    @property
    def work(self) -> Workload | None:
        """The workload; None where children make it."""
        return self.runs.work if isinstance(self.runs, InProcess) else None

    @property
    def earlier_s(self) -> float:
        """Seconds that earlier runs of this search have taken."""
        return 0.0 if self.file is None else self.file.earlier_s

    @property
    def predictable(self) -> InProcess | None:
        """What runs the trials, where a trace predicts their memory; None where it does not, or shall not."""
        runs = self.runs
        # A trace issues no collectives, for which other ranks would wait.
        if not (self.options.predicts and self.ranks.world_size == 1 and isinstance(runs, InProcess)):
            return None
        return runs if is_traceable(runs.work, runs.device) else None

    def recall(self) -> Recall | None:
        """What the store holds about this search; None without a store."""
        options, runs = self.options, self.runs
        make_digest: Callable[[], str]
        if self.own is not None and self.own.digest is not None:
            make_digest = partial(str, self.own.digest)
        elif isinstance(runs, InProcess) and options.uses_store:
            make_digest = partial(
                rank_digest,
                runs.work,
                runs.device,
                name=options.key,
                sample_size=self.search.sizes.first,
                asked_bytes=options.budget_bytes,
            )
        else:
            return None
        return recall(
            make_digest,
            self.search,
            self.ranks,
            fresh=options.fresh or (self.own is not None and self.own.fresh),
            steps=options.steps,
            soak_steps=options.soak_steps,
            predict=options.predict,
        )

    def _agree(self) -> None:
        """Refuse ranks with other settings; the budget is the smallest of any rank's."""
        options, ranks = self.options, self.ranks
        settings = [self.search.to_json(), options.steps, options.soak_steps]
        settings += [options.time_limit_s is not None, options.resume is not None]
        settings += [options.predict, options.store, options.fresh, options.key]
        ranks.same(settings, doing="the settings of the search")
        usable = usable_bytes(
            self.runs.device,
            options.budget,
            options.budget_bytes,
            held_bytes=0 if self.work is None else ram_bytes(self.work._held),
            says=ranks.is_main,
        )
        self.search = replace(self.search, budget_bytes=ranks.minimum(usable, doing="the budget"))

    def _resume(self, text: str, compared: dict[str, Any]) -> None:
        """Go on with the search that rank 0 has read from the resume file."""
        if self.file is None:
            return
        device = self.runs.device.name
        made = {"device": device, "state_elements": self.runs.state_elements}
        # The file is rank 0's: the other ranks' devices have other names.
        text, made = self.ranks.gather([text, made], doing="the search to resume")[0]
        budget_bytes = self.search.budget_bytes or 0
        earlier, self.trials = self.file.begin(text, self.search, {**compared, **made})
        self.search = _within(earlier, budget_bytes, device)

    def _warn_of_undeclared_state(self) -> None:
        if self.work is not None and not self.work.declared and self.ranks.is_main:
            warnings.warn(
                "the step's state is not declared, so a trial changes the model and optimizer that it uses. "
                "Pass batchfit.Workload(step, state=[model, optimizer]) to have them restored afterwards.",
                stacklevel=5,  # the caller of `find_batch_size`
            )


def is_traceable(work: Workload, device: Device) -> bool:
    """Whether a trace predicts the memory of this device: CUDA with torch's own allocator, state declared."""
    own = getattr(device, "is_torchs_own", True)  # the only allocator that can be replayed
    return device.name.startswith("cuda") and own and work.declared and not work._by_tokens


def _within(search: Search, budget_bytes: int, device: str) -> Search:
    """The search of an earlier run; where that had much more memory, it goes on within what is free now.

    A search that has ended has its answer, and runs nothing.
    """
    begun_bytes = search.budget_bytes or 0
    if search.ask() is None or not SharedBudget(begun_bytes, begun_bytes).lacks(budget_bytes):
        return search
    log.warning(
        "%s are free on %s now, and %s were when the search was begun; searching on within what is free",
        *(format_bytes(budget_bytes), device, format_bytes(begun_bytes)),
    )
    return replace(search, budget_bytes=budget_bytes, predicted=None)
