"""The prediction of a program: `predict_source` with traces of its runs.

Rule: a program may have fewer samples than the size at which its lines would be drawn; then they are drawn
from smaller sizes, down to the two small ones.
"""

from __future__ import annotations

from batchfit._predict.predict import predict_source
from batchfit._predict.pure.options import PredictOptions
from batchfit._program.tracing.traces import SMALL, ProgramTraces, TooFewSamplesError
from batchfit.errors import ProgramError
from batchfit.results import Prediction


def predict_program(traces: ProgramTraces, options: PredictOptions) -> Prediction:
    """Predict the largest batch size of a program, for the GPU of its traces."""
    while True:
        try:
            return predict_source(traces, options)
        except TooFewSamplesError as error:
            if error.most <= SMALL:
                raise ProgramError("the program has too few samples for two steps of 3 samples") from None
            traces.most_size = error.most
