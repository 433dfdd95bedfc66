"""What a process of its own runs in the tests of Liger: its kernels in Triton's interpreter, on a CPU.

Triton reads TRITON_INTERPRET when it is imported, and Liger replaces functions of transformers for good. The
interpreter of Triton 3.9 lacks two things that its compiler has: numbers given to a kernel as tensors, and
`rsqrt` of CUDA's own library.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import liger_kernel.ops.rms_norm as norms
import numpy as np
import torch
import transformers
import triton
import triton.language as tl
from triton.runtime import interpreter

SIZE, SPLIT = 5, 2


@triton.jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    return tl.rsqrt(x)


def run_on_a_cpu() -> None:
    own = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return own(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = converted
    norms.rsqrt = rsqrt


def in_trainer(folder: Path, *, liger: bool, size: int | None) -> Any:
    from hf_models import Tokens, arguments, gradients_of, padded
    from trl_cases import llama

    given = {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0, "gradient_accumulation_steps": 1}
    trainer = transformers.Trainer(
        llama(num_hidden_layers=1),
        arguments(folder, **given, per_device_train_batch_size=SIZE, use_liger_kernel=liger),
        train_dataset=Tokens(padded=False, classes=4),
        data_collator=padded,
    )
    return gradients_of(split(trainer, size))


def in_sft(folder: Path, *, liger: bool, size: int | None) -> Any:
    from trl_cases import gradients_of, llama, trainer_of

    model = llama(num_hidden_layers=1)
    trainer = trainer_of("SFT", folder, model=model, batch=SIZE, use_liger_kernel=liger)
    return gradients_of(split(trainer, size))


def split(trainer: Any, size: int | None) -> Any:
    from batchfit.integrations.transformers import adapt

    if size is not None:
        adapt(trainer, find=False)._batchfit.microbatch_size = size
    return trainer


def off(found: Any, wanted: Any) -> float:
    return float((found - wanted).norm() / wanted.norm())


def main(name: str) -> None:
    warnings.simplefilter("ignore")
    run_on_a_cpu()
    run, folder = {"Trainer": in_trainer, "SFT": in_sft}[name], Path(tempfile.mkdtemp())
    plain = run(folder, liger=False, size=None)  # before Liger replaces anything
    whole = run(folder, liger=True, size=None)
    cut = run(folder, liger=True, size=SPLIT)
    replaced = "liger" in transformers.models.llama.modeling_llama.LlamaRMSNorm.forward.__module__
    answer = {
        "off": off(cut, whole),
        "from plain": off(whole, plain),
        "differs": not torch.equal(whole, plain),
    }
    print(json.dumps({**answer, "replaced": replaced}))


if __name__ == "__main__":
    main(sys.argv[1])
