"""The search over a program's sizes: options and a command in, what `find_with` needs out.

Rules: the first run of the command is the first trial of the search, also where a file is resumed from, and
the trial that confirms a stored size where there is one. A search in a file goes on only with the same
command.
"""

from __future__ import annotations

import time
from dataclasses import replace

from batchfit._engine.trial.in_children import ChildDevice
from batchfit._engine.trial.pure.soak import SOAK_STEPS
from batchfit._engine.trial.trial import TrialRequest
from batchfit._find.pure.options import FindOptions
from batchfit._find.resume import ResumeFile
from batchfit._find.session import OwnTrials
from batchfit._program.config_copy import changed_files
from batchfit._program.pure.stored_name import StoredName
from batchfit._program.pure.template import isolating_flag
from batchfit._program.stored import command_digest, stored_before
from batchfit._program.trials import ProgramTarget, ProgramTrials


def program_trials(
    target: ProgramTarget, options: FindOptions, stored: StoredName | None = None
) -> OwnTrials:
    """The trials of a program, for `find_with`; nothing is run yet. `stored`: how it is remembered."""
    search = options.search(costly_trials=True)
    known: ChildDevice | None = None
    kept = None if options.resume is None else ResumeFile(options.resume).kept()
    if kept is not None:
        search = kept.search
        device = kept.settings.get("device")
        if search.ask() is None and isinstance(device, str) and search.budget_bytes:
            known = ChildDevice(device, search.budget_bytes, search.budget_bytes, 0)  # nothing will be run
    soak_steps = max(SOAK_STEPS, options.steps) if options.soak_steps is None else options.soak_steps
    digest = None if stored is None else command_digest(stored, target.template, options)
    request = search.ask()
    size, soak = (search.sizes.first, False) if request is None else (request.size, request.soak)
    if digest is not None and stored is not None and not stored.fresh and not search.observations:
        before = stored_before(digest, search, options)
        size, soak = (size, soak) if before is None else (before, search.soak)
    first = TrialRequest(size, steps=soak_steps if soak else options.steps, soak=soak)
    target = replace(
        target,
        budget_bytes=options.budget_bytes,
        device=None if options.device is None else str(options.device),
        timeout_s=options.timeout_s,
        deadline_s=None if options.time_limit_s is None else time.monotonic() + options.time_limit_s,
        soak_steps=soak_steps,
    )
    flag = isolating_flag(target.template.words)
    if flag:
        raise ValueError(
            f"the command must start Python without {flag}, with which it ignores PYTHONPATH or "
            "sitecustomize: the probe is loaded through them"
        )
    changed_files(target.template, size)  # what is wrong with them is said before anything is run
    template = target.template
    command = [*template.words, *template.env, *(one.text for one in template.sets)]
    fresh = stored is not None and stored.fresh
    trials = ProgramTrials(target, first, known=known)
    return OwnTrials(trials, {"command": command}, digest=digest, fresh=fresh, caveats=trials.caveats)
