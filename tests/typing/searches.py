"""Read by mypy: the three searches are `AskTell` values."""

from __future__ import annotations

from batchfit._ask_tell import AskTell
from batchfit._find.pure.search import Observation, Request, Search
from batchfit._profile.pure.knee import Knee, Timed, TimingRequest
from batchfit._rerun.pure.rerun import Rerun, RunObservation, RunRequest

fitting: AskTell[Request, Observation] = Search()
timing: AskTell[TimingRequest, Timed] = Knee()
running: AskTell[RunRequest, RunObservation] = Rerun(start=64)
