"""torch.compile: what is compiled, how often, and what it must leave alone. Never imports dynamo itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from batchfit._engine.torch_private.lookup import optional

# In a module: what its calls run, once `module.compile()` was called.
COMPILED_CALL = "_compiled_call_impl"
DEFAULT_LIMIT = 8


def is_loaded() -> bool:
    """Whether anything can have been compiled: loading it takes a second."""
    return "torch._dynamo" in sys.modules


def is_compiled(thing: Any) -> bool:
    """Whether torch.compile makes new code for each new size that a model or a function is given."""
    return hasattr(thing, "_orig_mod") or is_compiled_function(thing) or compiled_call(thing) is not None


def is_compiled_model(module: Any) -> bool:
    """Whether a call of a module goes through torch.compile."""
    return hasattr(module, "_orig_mod") or compiled_call(module) is not None


def is_compiled_function(function: Any) -> bool:
    """Whether torch.compile has put this function around another."""
    return hasattr(function, "_torchdynamo_orig_callable")


def compiled_call(module: Any) -> Any:
    """What the calls of a module run; None where it was not compiled in place."""
    return getattr(module, COMPILED_CALL, None)


def original(module: Any) -> Any:
    """What `torch.compile(module)` has wrapped, or the module itself."""
    return getattr(module, "_orig_mod", module)


def compilations() -> int:
    """How many frames torch.compile has compiled in this process; 0 where it was never loaded.

    0 as well where this torch does not count them: then no growth is seen.
    """
    counters: Any = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    return int(counters["frames"]["ok"]) if counters is not None else 0


def recompile_limit() -> int | None:
    """How many versions torch.compile makes of one function; None where it was never used."""
    config: Any = getattr(sys.modules.get("torch._dynamo"), "config", None)
    limit = getattr(config, "recompile_limit", getattr(config, "cache_size_limit", None))
    return limit if isinstance(limit, int) else None


# -- code of ours, of which it keeps its hands off

_frames: Any = optional("torch._C._dynamo.eval_frame")
_has_strategies = all(
    hasattr(_frames, name) for name in ("set_code_exec_strategy", "_FrameAction", "_FrameExecStrategy")
)
SKIPS = _has_strategies or hasattr(_frames, "skip_code")


def skip(functions: Iterable[Any]) -> None:
    """Keep dynamo from compiling these frames where the user's are under torch.compile.

    Where there is no way to ask for that (not `SKIPS`), a dispatch mode must let torch wrap it.
    """
    for code in filter(None, (getattr(function, "__code__", None) for function in functions)):
        if _has_strategies:
            action = _frames._FrameAction.SKIP
            _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(action, action))
        elif hasattr(_frames, "skip_code"):
            _frames.skip_code(code)
