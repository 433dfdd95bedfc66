"""FSDP2 (`fully_shard`): its states, groups of parameters and their records of the step that they are in.

Rules: FSDP is imported by nobody who has not imported it, which takes a second. What cannot be read is
refused; a factor that gradients are divided by is read or refused, never assumed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from batchfit._engine.torch_private import needs
from batchfit._engine.torch_private.fake import unset_fake_temporarily
from batchfit._engine.torch_private.lookup import optional

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_MISSING: Final = object()
_no_modes: Any = optional("torch.utils._python_dispatch._disable_current_modes")
# Functions of FSDP2 inside which collectives are prepared, done and unpacked.
_COLLECTIVES: Final = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")


def is_sharded(module: object) -> bool:
    """Whether `fully_shard` was called on it."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def state_of(module: Any) -> Any:
    """What FSDP2 knows of a sharded module."""
    return _state(module)


def groups(module: Any) -> list[Any]:
    """The groups of parameters that a sharded module gathers and reduces together."""
    return _groups_of(_state(module))


def parameters(group: Any) -> list[Any]:
    """FSDP2's records of the parameters of a group, for the functions below."""
    return list(_read(group, "fsdp_params"))


def sharded(parameter: Any) -> Any:
    """The parameter as the model and the optimizer have it."""
    return _read(parameter, "sharded_param")


def gathered(parameter: Any) -> torch.Tensor | None:
    """The one that stands for it in a graph, once it has been gathered."""
    return getattr(parameter, "_unsharded_param", None)


def is_spread(parameter: Any) -> bool:
    """Whether it is spread by tensor parallelism, too."""
    return bool(_read(parameter, "is_dtensor"))


def is_root(module: Any) -> bool:
    """Whether it is the root of what is sharded, which it becomes when it first runs."""
    return is_sharded(module) and bool(_read(_state(module), "_is_root"))


def at_rest(root: Any) -> bool:
    """Whether no part of it is in the middle of a step."""
    return all(_read(one, "_training_state").name == "IDLE" for one in _all_states(root))


def can_reset() -> bool:
    """Whether FSDP2 of this torch can be reset after a step that failed in it."""
    return hasattr(_part("_fsdp_state", "FSDPState"), "_reset_iter_state") or not lost_to_reset()


@functools.cache
def lost_to_reset() -> tuple[str, ...]:
    """What `_reset_in_place` needs, and FSDP2 of this torch nowhere uses."""
    # Where FSDP2 does not run on a CPU (torch 2.6), no test has shown that the reset is right.
    return (*(() if runs_on_cpu() else ("torch.cpu.Stream.record_event",)), *_unused(_RESET_NAMES))


def reset(root: Any) -> None:
    """Back to rest after a step that failed, with no gradient on any gathered parameter.

    torch 2.15 takes away the gradients of sharded parameters, too: they are put in place afterwards.
    """
    if hasattr(_state(root), "_reset_iter_state"):
        _state(root)._reset_iter_state()
    else:
        _reset_in_place(root)
    # That forgets one thing (seen in 2.13): a backward that failed between making a gradient and reducing
    # it leaves the gradient on the unsharded parameter, and the next backward adds to it.
    for state in _all_states(root):
        for group in _groups_of(state):
            for parameter in parameters(group):
                # In 2.15 a property without a setter, which reads the gradient below.
                if "unsharded_accumulated_grad" in vars(parameter):
                    parameter.unsharded_accumulated_grad = None
                unsharded = gathered(parameter)
                if unsharded is not None:
                    unsharded.grad = None
            # A first step that failed while FSDP2 was made ready: what is left of that is never made up for.
            if not all(hasattr(one, "param_dtype") for one in parameters(group)):
                _read(group, "lazy_init")()


def _reset_in_place(root: Any) -> None:
    """What torch does in `_reset_iter_state` since 2.13, for the versions before it.

    It waits for what is under way, drops what the failed step was to reduce, and shards every parameter.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    state = _state(root)
    shared, communication = _read(state, "_state_ctx"), _read(state, "_comm_ctx")
    stream = _read(state, "_device_handle").current_stream()
    _wait(stream, communication.all_gather_state)
    communication.all_gather_state = None
    if hasattr(communication, "reduce_scatter_states"):  # a list since torch 2.12 or earlier
        for one in communication.reduce_scatter_states:
            _wait(stream, one)
        communication.reduce_scatter_states.clear()
    else:
        _wait(stream, communication.reduce_scatter_state)
        communication.reduce_scatter_state = None
    communication.post_forward_order.clear()
    for one in _all_states(root):
        one._modules_to_run_forward.clear()
        one._training_state = TrainingState.IDLE
        for group in _groups_of(one):
            _reset_group(group, stream)
            group._training_state = TrainingState.IDLE
            group._to_sharded()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def _reset_group(group: Any, stream: Any) -> None:
    """Wait for what a group of parameters has under way, and forget it."""
    gathering = group._all_gather_result
    if gathering is not None:
        if gathering.all_gather_event is not None:
            stream.wait_event(gathering.all_gather_event)
        if hasattr(gathering.all_gather_work, "wait"):
            gathering.all_gather_work.wait()
    if group._post_reduce_event is not None:
        stream.wait_event(group._post_reduce_event)
    _wait(stream, group._all_reduce_state)
    if group._reshard_after_forward_event is not None:
        group._wait_all_gather_streams_on_event(group._reshard_after_forward_event)
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
    group._reshard_after_forward_event = group._partial_reduce_output = None
    group._post_forward_indices.clear()


def _wait(stream: Any, work: Any) -> None:
    """Until a collective that is under way, if any, is done on that stream."""
    if work is not None and work.event is not None:
        stream.wait_event(work.event)


def forget_forwards(module: Any) -> None:
    """A forward without a backward is no part of the order in which the next backward gathers."""
    state = _state(module)
    # Made when the root first runs. Were it kept elsewhere, a microbatch would have one collective more than
    # was recorded, which is an error of its own.
    getattr(_read(state, "_comm_ctx"), "post_forward_order", []).clear()
    for group in _groups_of(state):
        _read(group, "_post_forward_indices").clear()


def reduces(group: Any) -> bool:
    """Whether gradients are reduced in each backward, as without `set_requires_gradient_sync(False)`."""
    return bool(_read(group, "reduce_grads")) and bool(_read(group, "all_reduce_grads"))


def divide_factor(group: Any) -> float | None:
    """What the sum of gradients is divided by, where a factor was asked for; refused if unreadable."""
    factor: Any = getattr(group, "gradient_divide_factor", _MISSING)
    if factor is not _MISSING:
        return None if factor is None else float(factor)
    # torch 2.6 keeps a reduction that multiplies, from which the factor cannot be read; None: none was asked.
    if getattr(group, "reduce_scatter_reduce_op", _MISSING) is None:
        return None
    raise needs.FSDP2_FACTOR.refusal()


def reads_factor() -> bool:
    """Whether a factor of the user's can be read."""
    return "gradient_divide_factor" in _used_in(_part("_fsdp_param_group", "FSDPParamGroup"))


def missing() -> list[str]:
    """What is read here, and FSDP2 of this torch nowhere uses."""
    return _unused(_NAMES)


def runs_on_cpu() -> bool:
    """Whether FSDP2 runs on a CPU."""
    return hasattr(torch.cpu.Stream, "record_event")


# -- on fakes, for a trace


def local_part(tensor: DTensor) -> Tensor:
    """This rank's part of a DTensor, the very tensor."""
    found: Tensor = tensor._local_tensor
    return found


def with_part(tensor: DTensor, part: Tensor) -> Tensor:
    """A tensor that is spread in the same way, with another part on this rank."""
    kind: Any = type(tensor)
    made: Tensor = kind(part, tensor._spec, requires_grad=tensor.requires_grad)
    return made


@contextlib.contextmanager
def sharding_on(device: torch.device) -> Iterator[None]:
    """Inside, `fully_shard` takes `device` for the one of a mesh of CPUs."""
    if not runs_on_cpu():
        raise needs.FSDP2_ON_CPU.refusal()
    with contextlib.ExitStack() as stack:
        found = False
        outside = unset_fake_temporarily
        for name in ("_fully_shard", "_fsdp_init"):
            module = _loaded(name)
            if hasattr(module, "_get_device_from_mesh"):
                found = True
                mesh = getattr(module, "_get_post_forward_mesh_info", None)  # a mesh is read as it is made
                if mesh is not None:
                    stack.enter_context(_put(module, "_get_post_forward_mesh_info", _noted(mesh, outside)))
                stack.enter_context(_put(module, "_get_device_from_mesh", lambda _: device))
        if not found:
            raise needs.FSDP2_STATE.refusal()
        yield


@contextlib.contextmanager
def collectives_noted(inside: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Inside, `inside()` is entered for as long as FSDP2 gathers or reduces something."""
    module = _loaded("_fsdp_param_group")
    with contextlib.ExitStack() as stack:
        for name in _COLLECTIVES:
            plain = getattr(module, name, None)
            if plain is None:
                raise needs.FSDP2_STATE.refusal()
            stack.enter_context(_put(module, name, _noted(plain, inside)))
        yield


@contextlib.contextmanager
def shapes_by_fakes() -> Iterator[None]:
    """Inside, a DTensor learns the shape of a result from fakes of torch's own, past every dispatch mode.

    torch enters a fake mode for that, but a mode that was entered earlier is asked first: to a trace such a
    tensor is the host's, of the whole model and not of a rank, and it would really be computed. Where torch
    has none of these names it is, with the same answer: seconds and gigabytes are lost.
    """
    place = optional("torch.distributed.tensor._sharding_prop.ShardingPropagator")
    name = "_propagate_tensor_meta_non_cached"
    if place is None or not hasattr(place, name) or _no_modes is None:
        yield
        return
    with _put(place, name, _noted(getattr(place, name), _no_modes)):
        yield


def _noted(plain: Any, inside: Callable[[], contextlib.AbstractContextManager[Any]]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with inside():
            return plain(*args, **kwargs)

    return call


def forget_sharding(module: nn.Module) -> None:
    """As if `fully_shard` had never been called on a module, as far as torch keeps that elsewhere."""
    known = getattr(
        importlib.import_module("torch.distributed._composable_state"), "_module_state_mapping", None
    )
    if known is None:
        raise needs.FSDP2_STATE.refusal()
    known.pop(module, None)


def offloaded(module: nn.Module) -> list[Tensor]:
    """The parameters of a sharded module that FSDP2 keeps on the host."""
    records = (one for group in groups(module) for one in parameters(group))
    return [sharded(one) for one in records if one.offload_to_cpu]


@contextlib.contextmanager
def faked_records(module: nn.Module, fake_of: Callable[..., Tensor], device: torch.device) -> Iterator[None]:
    """Inside, FSDP2's records of a sharded module hold fakes on `device`, and nothing was gathered yet."""
    state: Any = state_of(module)
    held = groups(module)
    records = [one for group in held for one in parameters(group)]
    shared = [one for holder in (state, *held) for one in _shared_by(holder)]
    with _kept(state, *held, *records, *shared):
        state._device = device
        for group in held:
            group.device = device
        for one in records:
            # Its parameter first: what is on the host stays there, as the fake of the same memory does.
            one.sharded_param = fake_of(one.sharded_param)
            host = torch.device("cpu") if one.offload_to_cpu else device
            one._sharded_param_data = fake_of(one._sharded_param_data, host)
            one.device = device
            one.all_gather_outputs = []
            one.unsharded_accumulated_grad = None
            vars(one).pop("_unsharded_param", None)
        yield


def _shared_by(holder: Any) -> list[Any]:
    """What FSDP2's states and groups have in common."""
    found = (getattr(holder, name, None) for name in ("_state_ctx", "_comm_ctx", "comm_ctx"))
    return [one for one in found if one is not None]


@contextlib.contextmanager
def _kept(*objects: Any) -> Iterator[None]:
    """Afterwards these have the attributes that they had, and lists and tables among them their items."""
    before = [(one, {name: _copied(value) for name, value in vars(one).items()}) for one in objects]
    try:
        yield
    finally:
        for one, values in before:
            vars(one).clear()
            vars(one).update(values)


def _copied(value: Any) -> Any:
    return value.copy() if type(value) in (list, dict, set) else value


@contextlib.contextmanager
def _put(holder: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


_OF_GROUPS: Final = "fsdp_params reduce_grads all_reduce_grads _post_forward_indices"
_NAMES: Final = (
    ("_fully_shard", "FSDPModule", "_get_fsdp_state"),
    ("_fsdp_state", "FSDPState", "_is_root _state_ctx _comm_ctx _training_state _fsdp_param_group"),
    ("_fsdp_state", "FSDPStateContext", "all_states"),
    ("_fsdp_param_group", "FSDPCommContext", "post_forward_order"),
    ("_fsdp_param_group", "FSDPParamGroup", _OF_GROUPS),
    ("_fsdp_param", "FSDPParam", "sharded_param is_dtensor _unsharded_param"),
)


_RESET_NAMES: Final = (
    ("_fsdp_common", "TrainingState", "IDLE"),
    ("_fsdp_state", "FSDPState", "_device_handle _modules_to_run_forward"),
    ("_fsdp_state", "FSDPStateContext", "iter_forward_root post_backward_final_callback_queued"),
    ("_fsdp_param_group", "FSDPCommContext", "all_gather_state"),
    ("_fsdp_param_group", "AllGatherState", "event"),
    ("_fsdp_param_group", "ReduceScatterState", "event"),
    ("_fsdp_param_group", "AllReduceState", "event"),
    ("_fsdp_collectives", "AllGatherResult", "all_gather_event all_gather_work"),
    (
        *("_fsdp_param_group", "FSDPParamGroup"),
        "_all_gather_result _post_reduce_event _all_reduce_state _reshard_after_forward_event "
        "_partial_reduce_output _wait_all_gather_streams_on_event _to_sharded",
    ),
)


def _unused(names: Iterable[tuple[str, str, str]]) -> list[str]:
    """Of (module, class, names), those that the class nowhere uses."""
    found = []
    for module, kind, wanted in names:
        used = _used_in(_part(module, kind))
        found += [f"{kind}.{name}" for name in wanted.split() if name not in used]
    return found


def _part(module: str, name: str) -> Any:
    """A class of FSDP2's; None where it is not there."""
    return getattr(_loaded(module), name, None)


def _loaded(module: str) -> Any:
    """A module of FSDP2's; None where it is not there."""
    try:
        return importlib.import_module(f"torch.distributed.fsdp._fully_shard.{module}")
    except ModuleNotFoundError:
        return None


def _used_in(kind: Any) -> set[str]:
    """The names that a class has, and those that its methods use."""
    if kind is None:
        return set()
    codes = [one.__code__ for one in vars(kind).values() if hasattr(one, "__code__")]
    return {*vars(kind), *(name for code in codes for name in code.co_names)}


def _state(module: Any) -> Any:
    get = getattr(module, "_get_fsdp_state", None)
    if get is None:
        raise needs.FSDP2_STATE.refusal()
    return get()


def _all_states(root: Any) -> Iterator[Any]:
    yield from _read(_read(_state(root), "_state_ctx"), "all_states")


def _groups_of(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    one = _read(state, "_fsdp_param_group")  # up to torch 2.11: one at most
    return [] if one is None else [one]


def _read(of: Any, name: str) -> Any:
    value = getattr(of, name, _MISSING)
    if value is _MISSING:
        raise needs.FSDP2_STATE.refusal()
    return value
