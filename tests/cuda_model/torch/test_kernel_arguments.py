"""What CUDA's kernels take in the installed torch, beside what predictions give them."""

from __future__ import annotations

from batchfit._engine.cuda_model import kernel_arguments


def test_this_torch_is_the_one_that_predictions_know() -> None:
    assert kernel_arguments.changed(kernel_arguments.RECURRENT) == []
    assert kernel_arguments.changed(kernel_arguments.ATTENTION) == []


def test_other_arguments_and_missing_operations_are_named() -> None:
    takes = kernel_arguments.RECURRENT["_cudnn_rnn"]
    known = {"_cudnn_rnn": f"{takes} more", "_no_such_operation": "input"}
    assert kernel_arguments.changed(known) == ["_cudnn_rnn", "_no_such_operation"]
    assert kernel_arguments.changed({"_cudnn_rnn": takes}) == []
