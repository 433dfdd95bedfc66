"""The prediction of a program: `predict_source` with traces of its runs."""

from __future__ import annotations

from batchfit._predict.predict import predict_source
from batchfit._predict.pure.options import PredictOptions
from batchfit._program.tracing.traces import ProgramTraces, lines_from_what_there_is
from batchfit.results import Prediction


def predict_program(traces: ProgramTraces, options: PredictOptions) -> Prediction:
    """Predict the largest batch size of a program, for the GPU of its traces."""
    return lines_from_what_there_is(traces, lambda: predict_source(traces, options))
