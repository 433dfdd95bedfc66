"""What is private in torch is there, or its absence is said: each name is taken away once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from fresh import without
from torch import nn

import batchfit
from batchfit._engine.cuda_model import autocast_check, dispatch
from batchfit._engine.torch_private import autograd, dynamo, fake, lookup, modules, storage
from batchfit._engine.torch_private import dispatch as dispatcher
from batchfit._engine.trace.fake_cache import FakeResults
from batchfit._engine.trace.trace import trace_caveats
from batchfit.errors import BatchfitError, UntraceableError

# -- taken away: refused with torch's version and what to do


@pytest.mark.parametrize(
    ("module", "name", "use"),
    [
        ("dispatch", "torch._C._DisableTorchDispatch", lambda one: one.modes_disabled()),
        ("dispatch", "torch._C.DisableTorchFunctionSubclass", lambda one: one.plain_functions()),
        (
            "dispatch",
            "torch._C._dispatch_has_kernel_for_dispatch_key",
            lambda one: one.is_composite(torch.ops.aten.mm.default),
        ),
        ("dispatch", "torch._C._get_dispatch_mode", lambda one: one.tracing()),
        ("dispatch", "torch._C._TorchDispatchModeKey", lambda one: one.tracing()),
        ("autograd", "torch._C._current_graph_task_id", lambda one: one.in_backward()),
        ("storage", "torch.storage.UntypedStorage._cdata", lambda one: one.address_of(torch.ones(1))),
        ("storage", "torch.UntypedStorage._new_with_weak_ptr", lambda one: one._of_address(0)),
        ("foreach", "torch._foreach_add_", lambda one: one.add_([], [])),
        ("modules", "torch.nn.Module._call_impl", lambda one: one.call_of(nn.Linear(1, 1))),
        ("modules", "torch.mps._get_default_mps_generator", lambda one: one.mps_generator()),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_needs_a_missing_name_is_refused(
    module: str, name: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        found = without(patch, module, name)
        with pytest.raises(BatchfitError) as caught:
            use(found)
    text = str(caught.value)
    assert f"torch {torch.__version__} has no {name}" in text
    assert "use a torch that it is tested with" in text


@pytest.mark.parametrize(
    ("module", "name", "use"),
    [
        (
            "dispatch",
            "torch._C._dispatch_get_registrations_for_dispatch_key",
            lambda one: one.registered("AutocastCUDA"),
        ),
        ("dispatch", "torch._C._ExcludeDispatchKeyGuard", lambda one: one.excluding(None)),
        ("dispatch", "torch.library.Library._destroy", lambda one: one.end_library(None)),
        ("autograd", "torch._C._current_autograd_node", lambda one: one.current_node()),
        ("autograd", "torch.autograd._get_sequence_nr", lambda one: one.next_number()),
        (
            "fake",
            "torch._subclasses.fake_tensor.unset_fake_temporarily",
            lambda one: one.unset_fake_temporarily(),
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_trace_that_needs_a_missing_name_is_refused(
    module: str, name: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        found = without(patch, module, name)
        with pytest.raises(UntraceableError) as caught:
            use(found)
    text = str(caught.value)
    assert f"torch {torch.__version__} has no {name}" in text
    assert "batchfit find measures instead" in text


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        ("dispatch", "torch.utils._python_dispatch.TorchDispatchMode", BatchfitError),
        ("fake", "torch._subclasses.fake_tensor.FakeTensor", UntraceableError),
    ],
)
def test_a_class_that_all_is_made_of_is_refused_at_import(
    module: str, name: str, error: type[BatchfitError], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(error, match=f"has no {name}"):
        without(patch, module, name)


def test_a_fake_tensor_without_its_attributes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fake.missing() == ()
    fake.check()
    fake.missing.cache_clear()
    model = nn.Linear(2, 2)
    with monkeypatch.context() as patch:
        patch.setattr(fake, "_OF_TENSORS", ("constant", "fake_devices"))
        with pytest.raises(UntraceableError, match=r"has no .*FakeTensor\.fake_devices"):
            batchfit.predict_batch_size(
                batchfit.Workload(lambda n: model(torch.ones(n, 2)), state=[model]), budget="1GiB"
            )
    fake.missing.cache_clear()


def test_autocast_without_its_attributes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchfit._engine.torch_private import autocast

    region = torch.autocast("cpu", dtype=torch.bfloat16)
    assert autocast.region_of(region) == ("cpu", torch.bfloat16, True, True)
    del region.fast_dtype
    with pytest.raises(BatchfitError, match=r"has no torch\.autocast\.fast_dtype"):
        autocast.region_of(region)


def test_an_operation_without_its_attributes_is_refused() -> None:
    found = lookup.attribute(torch.ops.aten.add.Tensor, "_schemas")
    with pytest.raises(BatchfitError, match=r"has no torch\._ops\.OpOverload\._schemas"):
        found(torch.ops.aten.mul.Tensor)
    assert (
        lookup.attribute(torch.ops.aten.add.Tensor, "_schema")(torch.ops.aten.mul.Tensor).name == "aten::mul"
    )


# -- taken away: another answer


def test_what_is_answered_in_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        found = without(
            patch,
            "dispatch",
            "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
            "torch._C._get_cudnn_enabled",
            "torch._C._get_mkldnn_enabled",
            "torch._C._dispatch_key_set",
            "torch.Tensor._make_subclass",
        )
        assert (found.uses_cudnn(), found.uses_mkldnn()) == (
            torch.backends.cudnn.enabled,
            torch.backends.mkldnn.enabled,
        )
        assert found.keys_of is None
        made = found.make_subclass(nn.Parameter, torch.ones(2), True)
        assert isinstance(made, nn.Parameter)
        assert made.requires_grad
        assert not found.is_wrapper(made)
        assert found.is_wrapper(_Wrapper(torch.ones(1)))
    assert dispatcher.is_wrapper(_Wrapper(torch.ones(1)))


class _Wrapper(torch.Tensor):
    def __tensor_flatten__(self) -> Any:
        return [], None

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> Any:
        raise NotImplementedError


def test_an_error_of_torchs_without_its_name_is_vaguer(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        found = without(patch, "fake", "torch._subclasses.fake_tensor.DynamicOutputShapeException")
    assert found.DynamicOutputShapeException is found.NeverRaised
    assert found.DataDependentOutputException is fake.DataDependentOutputException


def test_a_value_that_torch_would_not_forget_is_not_known() -> None:
    mode = fake.FakeTensorMode()
    one = FakeResults(mode).empty((), (), torch.float32, torch.device("cpu"))
    fake.keep_value(mode, one, torch.tensor(3.0))
    assert getattr(one, "constant", None) is not None
    other = FakeResults(mode).empty((), (), torch.float32, torch.device("cpu"))
    mode.fake_tensor_converter = object()  # type: ignore[assignment]
    fake.keep_value(mode, other, torch.tensor(3.0))
    assert getattr(other, "constant", None) is None


def test_a_result_is_asked_for_each_time_where_keys_cannot_be_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mode = fake.FakeTensorMode()
    results = FakeResults(mode)
    one = results.empty((4,), (1,), torch.float32, torch.device("cpu"))
    assert results.describe(one, ()) is not None
    monkeypatch.setattr("batchfit._engine.trace.fake_cache.keys_of", None)
    assert results.describe(one, ()) is None


def test_who_backward_is_and_who_holds_what_may_be_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert autograd.engine_code() is not None
    with monkeypatch.context() as patch:
        patch.delattr(torch.autograd.graph, "_engine_run_backward")
        assert autograd.engine_code() is None
    with monkeypatch.context() as patch:
        found = without(patch, "storage", "torch._C._storage_Use_Count")
    assert found.use_counts(torch.ones(1)) is None


def test_arguments_are_walked_without_torchs_own_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ([1, (2, 3)], {"a": 4})
    with monkeypatch.context() as patch:
        found = without(patch, "dispatch", "torch.utils._pytree.tree_map")
    for walk in (found.tree_map, dispatcher.tree_map):
        assert walk(lambda one: one * 2, values) == ([2, (4, 6)], {"a": 8})


# -- there


def test_a_weak_storage_lets_go_and_finds_again() -> None:
    tensor = torch.ones(1000)
    seen = weakref.ref(tensor.untyped_storage())
    weak = storage.WeakStorage(tensor.untyped_storage())
    assert weak.is_of(tensor)
    assert weak.is_of(tensor[2:])
    assert not weak.is_of(torch.ones(1000))
    live = weak.live()
    assert live is not None
    assert live.data_ptr() == tensor.data_ptr()
    del tensor, live
    gc.collect()
    assert weak.live() is None
    assert seen() is None  # and whoever counts storages by their objects counts it no more


@pytest.mark.parametrize("plain", [True, False])
def test_both_kinds_of_weak_storage_do_the_same(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "wrapper_outlives_memory", lambda: plain)
    tensor = torch.ones(3)
    weak = storage.WeakStorage(tensor.untyped_storage())
    assert weak.is_of(tensor)
    live = weak.live()
    assert live is not None
    assert storage.storage_address(live) == storage.address_of(tensor)
    del tensor, live
    gc.collect()
    assert weak.live() is None
    assert not weak.is_of(torch.ones(3))


def test_what_is_compiled() -> None:
    model = nn.Linear(2, 2)
    assert not dynamo.is_compiled(model)
    assert not dynamo.is_compiled_model(model)
    model.compile(backend="eager")
    assert dynamo.is_compiled_model(model)
    wrapped = torch.compile(nn.Linear(2, 2), backend="eager")
    assert dynamo.is_compiled_model(wrapped)
    assert isinstance(dynamo.original(wrapped), nn.Linear)
    assert dynamo.is_compiled_function(torch.compile(len, backend="eager"))
    assert (dynamo.recompile_limit() or dynamo.DEFAULT_LIMIT) >= 1


def test_layers_of_a_kind() -> None:
    for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        assert isinstance(kind(2), modules.BatchNorm)
    assert not isinstance(nn.InstanceNorm1d(2), modules.BatchNorm)
    assert isinstance(nn.Dropout2d(), modules.Dropout)
    assert not isinstance(nn.Linear(1, 1), modules.Dropout)


def test_hooks_of_a_tensor() -> None:
    tensor = torch.ones(1, requires_grad=True)
    assert autograd.gradient_hooks(tensor) == ([], [])
    assert not autograd.has_late_hooks(tensor)
    before: Any = tensor.register_hook
    before(print)
    tensor.register_post_accumulate_grad_hook(id)
    assert autograd.gradient_hooks(tensor) == ([print], [id])
    assert autograd.has_late_hooks(tensor)


# -- autocast, by asking torch


def test_the_lists_do_what_this_torch_does() -> None:
    found = autocast_check.check_autocast()
    assert found.asked > 100
    assert found.differing == ()
    assert not found.caveat
    assert not torch.is_autocast_enabled("cuda")


def test_a_list_that_is_wrong_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast_check, "LOWER", tuple(name for name in dispatch.LOWER if name != "mm"))
    monkeypatch.setattr(autocast_check, "FP32", (*dispatch.FP32, "bmm"))
    found = autocast_check.check_autocast()
    assert found.differing == ("mm is in no list", "bmm runs in bfloat16, not float32")
    assert "mm is in no list" in found.caveat


def test_a_torch_that_was_not_tested_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is used without a word unless its lists differ."""
    asked: list[int] = []

    def check() -> autocast_check.AutocastAnswer:
        asked.append(1)
        return autocast_check.AutocastAnswer(100, ("mm is in no list",) if len(asked) == 2 else ())

    monkeypatch.setattr(autocast_check, "check_autocast", check)
    notes = []
    for version in ("2.15.1+cpu", "2.16.0a0+git123", "3.0.0"):
        monkeypatch.setattr(torch, "__version__", version)
        autocast_check.autocast_caveat.cache_clear()
        notes.append([note for note in trace_caveats([]) if note.startswith("autocast")])
    autocast_check.autocast_caveat.cache_clear()
    assert len(asked) == 2
    assert [len(one) for one in notes] == [0, 0, 1]
    assert "torch 3.0.0 differs from the lists that a trace follows (mm is in no list)" in notes[2][0]
