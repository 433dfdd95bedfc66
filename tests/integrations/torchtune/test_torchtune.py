"""torchtune's own recipes with ours on top: runs of a tiny Llama on the CPU, beside the stock recipes."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_private import gradient_hooks

# Not `torchtune` alone: this folder, beside which other tests lie, would be imported in its place.
pytest.importorskip("torchtune.config", reason="needs torchtune")

import tiny_torchtune
import torch
from omegaconf import OmegaConf
from public_api import gaps, public
from tiny_torchtune import tiny_config, write_checkpoint

import batchfit
from batchfit.integrations import torchtune as ours
from batchfit.integrations.torchtune import _warn_of_version as warn_of_version
from batchfit.testing import count_operations, fail_at, virtual_memory

# torchdata 0.11 calls a function that torch 2.13 deprecates, in every StatefulDataLoader.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

QUICK = {"soak_steps": 3, "tolerance": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    write_checkpoint(tmp_path)
    state, numbers = torch.get_rng_state(), random.getstate()
    yield tmp_path
    torch.set_rng_state(state)
    random.setstate(numbers)


def stock_class(name: str) -> Any:
    """torchtune's recipe, without us."""
    return ours.recipe_class(name).__mro__[2]


def trained(made: Any, config: dict[str, Any], *, train: bool = True) -> Any:
    cfg = OmegaConf.create(config)
    recipe = made(cfg=cfg)
    recipe.setup(cfg=cfg)
    if train:
        recipe.train()
        recipe.cleanup()
    return recipe


def model_of(recipe: Any) -> Any:
    return recipe._model


def loader_of(recipe: Any) -> Any:
    return recipe._dataloader


def largest_of(recipe: Any) -> Any:
    return recipe._largest


def forget(recipe: Any) -> None:
    """Optimizers in backward hang on the parameters in cycles that Python cannot collect."""
    for parameter in model_of(recipe).parameters():
        if gradient_hooks(parameter):
            gradient_hooks(parameter).clear()


def weights(recipe: Any) -> Any:
    """As an array, which virtual memory does not count."""
    return np.concatenate(
        [parameter.detach().numpy().copy().ravel() for parameter in model_of(recipe).parameters()]
    )


@pytest.mark.parametrize("name", ["full", "lora"])
def test_without_our_keys_the_weights_are_theirs(name: str, folder: Path) -> None:
    config = tiny_config(folder, name, gradient_accumulation_steps=2, clip_grad_norm=1.0)
    stock, own = trained(stock_class(name), config), trained(ours.recipe_class(name), config)
    assert type(own).__name__ == type(stock).__name__
    assert own.global_step == stock.global_step == 12
    assert np.array_equal(weights(own), weights(stock))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("full", {}),
        ("full", {"gradient_accumulation_steps": 3, "clip_grad_norm": 1.0}),
        ("full", {"optimizer_in_bwd": True}),
        ("lora", {}),
    ],
    ids=["full", "accumulating", "in backward", "lora"],
)
def test_the_maximum_is_used_and_nothing_else_has_changed(
    name: str, changes: dict[str, Any], folder: Path, living_bytes: int
) -> None:
    """After the search: the stock recipe with that batch size, bit for bit."""
    config = tiny_config(folder, name, use_maximum_batch_size=True, batchfit=QUICK, epochs=2, **changes)
    with virtual_memory(living_bytes + 2 * 2**20):
        own = trained(ours.recipe_class(name), config)
        size, found = largest_of(own), weights(own)
        assert loader_of(own).batch_size == size
        assert own.global_step == 2 * (48 // size // changes.get("gradient_accumulation_steps", 1))
        forget(own)
        del own
        gc.collect()
        stock = trained(stock_class(name), {**config, "batch_size": size})
        assert np.array_equal(found, weights(stock))
        forget(stock)
        del stock
        gc.collect()
        more = OmegaConf.create({**config, "batch_size": size + 2, "shuffle": False})
        stock = stock_class(name)(cfg=more)
        stock.setup(cfg=more)
        with pytest.raises(torch.OutOfMemoryError):  # and it was the largest
            stock.train()
        forget(stock)
        stock.cleanup()
        del stock
    assert 3 <= size <= 12


def test_the_size_never_leaves_an_epoch_without_a_step(folder: Path) -> None:
    config = tiny_config(
        folder, "full", use_maximum_batch_size=True, batchfit=QUICK, gradient_accumulation_steps=4
    )
    recipe = trained(ours.recipe_class("full"), config)
    assert loader_of(recipe).batch_size == 12
    assert recipe.global_step == 1


def test_a_function_increases_the_batch_epoch_by_epoch(folder: Path) -> None:
    config = tiny_config(
        folder,
        "full",
        batch_increase_function="tiny_torchtune.two_more_each_epoch",
        batchfit=QUICK,
        epochs=4,
    )
    recipe = trained(ours.recipe_class("full"), config)
    changes = [(event.progress.epoch, event.size_after) for event in recipe.batch_size_events]
    assert changes == [(1, 4), (2, 6), (3, 8)]
    assert recipe.global_step == 24 + 12 + 8 + 6
    # A cosine schedule that was made for exactly that many steps has come to its end.
    assert recipe._optimizer.param_groups[0]["lr"] == pytest.approx(0, abs=1e-9)
    logged = next((folder / "logs").glob("*.txt")).read_text()
    assert [
        line.split("batch_size:")[1].strip() for line in logged.splitlines() if "batch_size:" in line
    ] == [*("2", "4", "6", "8")]


@pytest.mark.parametrize("name", ["full", "lora"])
def test_an_increase_past_what_fits_is_skipped_and_said(
    name: str, folder: Path, living_bytes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(
        folder, name, batch_increase_function="tiny_torchtune:far_too_much", batchfit=QUICK, epochs=3
    )
    with virtual_memory(living_bytes + 2 * 2**20):
        recipe = trained(ours.recipe_class(name), config)
        (event,) = recipe.batch_size_events
        assert (event.kind, event.progress.epoch) == ("skipped", 1)
        assert f"an increase by 10000 to 10002 is more than the limit of {largest_of(recipe)}" in event.why
        assert loader_of(recipe).batch_size == 2
        assert recipe.global_step == 3 * 24
        said = "".join(capfd.readouterr())
        assert said.count(f"batch size {largest_of(recipe)}") == 1  # found
        assert said.count(f"Epoch 1: batch size stays 2: {event.why}") == 1
        del recipe


class _StoppedError(Exception):
    pass


@pytest.mark.parametrize("name", ["full", "lora"])
@pytest.mark.slow
def test_a_run_that_goes_on_has_the_sizes_and_weights_of_one_that_was_not_stopped(
    name: str, folder: Path
) -> None:
    made = ours.recipe_class(name)
    config = tiny_config(
        folder,
        name,
        batch_increase_function="tiny_torchtune.two_more_each_epoch",
        batchfit=QUICK,
        epochs=4,
        # On a CPU the lora recipe merges the adapter into the very weights it trains, at every checkpoint.
        save_adapter_weights_only=True,
    )
    elsewhere = {**config["checkpointer"], "output_dir": str(folder / "whole")}
    whole = weights(trained(made, {**config, "checkpointer": elsewhere}))

    class Stopped(made):  # type: ignore[misc]
        def save_checkpoint(self, epoch: int) -> None:
            super().save_checkpoint(epoch=epoch)
            if epoch == 1:
                raise _StoppedError

    with pytest.raises(_StoppedError):
        trained(Stopped, config)
    checkpointer = dict(config["checkpointer"])
    if name == "full":
        (file,) = (folder / "out" / "epoch_1").glob("model*")
        checkpointer.update(checkpoint_files=[f"epoch_1/{file.name}"])
    resumed = trained(made, {**config, "checkpointer": checkpointer, "resume_from_checkpoint": True})
    assert [(event.progress.epoch, event.size_after) for event in resumed.batch_size_events] == [
        *((2, 6), (3, 8))
    ]
    assert resumed.global_step == 24 + 12 + 8 + 6
    assert np.allclose(weights(resumed), whole, rtol=0, atol=1e-6)


# --- batches that do not fit while training


@pytest.mark.parametrize("name", ["full", "lora"])
def test_a_batch_that_does_not_fit_is_split_with_the_same_gradients(
    name: str, folder: Path, living_bytes: int
) -> None:
    config = tiny_config(folder, name, batch_size=16, epochs=2)
    clean = weights(trained(stock_class(name), config))
    with virtual_memory(living_bytes + 2 * 2**20):
        with pytest.raises(torch.OutOfMemoryError):
            trained(stock_class(name), config)
        recipe = trained(ours.recipe_class(name), config)
        split = weights(recipe)
        assert recipe.global_step == 6
        del recipe
    assert np.allclose(split, clean, rtol=0, atol=2e-4)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_running_out_early_in_the_middle_or_late_loses_no_step(share: float, folder: Path) -> None:
    config = tiny_config(folder, "full", batch_size=8, epochs=2)
    clean = trained(stock_class("full"), config)
    made = ours.recipe_class("full")
    with count_operations() as seen:
        trained(made, config, train=False).train()
    faults = 0
    for number in range(int(seen.operations * share), seen.operations, 1 + seen.operations // 400):
        recipe = trained(made, config, train=False)
        with fail_at(number) as fault:
            try:
                recipe.train()
            except torch.OutOfMemoryError:
                continue  # in the optimizer, the clipping or the loop itself: not in a batch
        assert fault.fired
        assert recipe.global_step == clean.global_step
        assert np.allclose(weights(recipe), weights(clean), rtol=0, atol=2e-4)
        faults += 1
        if faults == 2:
            break
    assert faults == 2


@pytest.fixture
def offloading(monkeypatch: pytest.MonkeyPatch) -> None:
    """`enable_activation_offloading`, which needs a GPU: nothing is moved here, and all else is the same."""
    from torchtune import training

    def made(_: Any, enable_activation_offloading: bool) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "default_stream", lambda *_: None)
            return training.OffloadActivations(
                use_pin_memory=False, use_streams=False, min_offload_size=2**60
            )

    monkeypatch.setattr(training, "get_act_offloading_ctx_manager", made)


@pytest.mark.usefixtures("offloading")
def test_running_out_with_offloaded_activations_loses_no_step(folder: Path, living_bytes: int) -> None:
    config = tiny_config(folder, "full", batch_size=16, epochs=2)
    clean = weights(trained(stock_class("full"), config))
    with virtual_memory(living_bytes + 2 * 2**20):
        recipe = trained(ours.recipe_class("full"), config)
        split = weights(recipe)
        assert recipe.global_step == 6
        assert not recipe.activations_handling_ctx.tracker
        del recipe
    assert np.allclose(split, clean, rtol=0, atol=2e-4)


@pytest.mark.usefixtures("offloading")
@pytest.mark.parametrize("share", [0.2, 0.7])
def test_a_search_goes_on_after_running_out_with_offloaded_activations(share: float, folder: Path) -> None:
    recipe = trained(ours.recipe_class("full"), tiny_config(folder, "full"), train=False)
    step = recipe._workload(loader_of(recipe)).step
    with count_operations() as seen:
        step(4)
    with fail_at(int(seen.operations * share)) as fault, pytest.raises(torch.OutOfMemoryError):
        step(4)
    assert fault.fired
    assert not recipe.activations_handling_ctx.tracker  # it would be alive in the next trial
    step(4)
    del step


def test_without_splitting_it_is_an_error(folder: Path, living_bytes: int) -> None:
    config = tiny_config(folder, "full", batch_size=16, split_on_out_of_memory=False)
    with virtual_memory(living_bytes + 2 * 2**20), pytest.raises(torch.OutOfMemoryError):
        trained(ours.recipe_class("full"), config)


def test_packed_batches_are_split_with_the_masks_of_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU torchtune packs with FlexAttention's masks: row 0 is one document, row 1 has two."""
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtune.data import padded_collate_packed
    from torchtune.modules import attention_utils

    def on_cpu(*args: Any, **keywords: Any) -> Any:
        return create_block_mask(*args, **{**keywords, "device": "cpu"})

    to = torch.Tensor.to

    def stay(tensor: torch.Tensor, *where: Any, **keywords: Any) -> torch.Tensor:
        return tensor if where == ("cuda",) else to(tensor, *where, **keywords)

    row = {name: torch.arange(128) for name in ("tokens", "labels", "input_pos")}
    rows = [{**row, "seq_lens": torch.tensor(lengths)} for lengths in ([128], [64, 64])]
    with monkeypatch.context() as patch:
        patch.setattr(attention_utils, "_SUPPORTS_FLEX_ATTENTION", True)
        patch.setattr(attention_utils, "create_block_causal_mask_flex", on_cpu, raising=False)
        patch.setattr(torch.Tensor, "to", stay)
        batch = padded_collate_packed(rows)
    model = torch.nn.Embedding(128, 1)
    seen: list[tuple[int, bool]] = []

    def loss(micro: Any) -> torch.Tensor:
        mask, zero = micro["mask"], torch.tensor(0)
        seen.append((mask.shape[0], bool(mask.mask_mod(zero, zero, torch.tensor(100), zero))))
        return model(micro["tokens"]).mean()

    mb = batchfit.Microbatcher(model, microbatch_size=1, weight=lambda micro: micro["labels"].numel())
    assert mb.backward(loss, batch).microbatch_sizes == (1, 1)
    assert seen[-2:] == [(1, True), (1, False)]


# --- bad input


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"use_maximum_batch_size": "yes"},
            TypeError,
            "use_maximum_batch_size must be True or False, not 'yes'",
        ),
        ({"split_on_out_of_memory": 1}, TypeError, "split_on_out_of_memory must be True or False, not 1"),
        (
            {"batch_increase_function": 3},
            ValueError,
            "batch_increase_function must be 'package.module.function'",
        ),
        ({"batch_increase_function": "grow"}, ValueError, "batch_increase_function must be"),
        ({"batch_increase_function": "tiny torchtune.grow"}, ValueError, "batch_increase_function must be"),
        (
            {"batch_increase_function": "tiny_torchtune.missing"},
            ValueError,
            "batch_increase_function must be importable, not 'tiny_torchtune.missing': .*No module",
        ),
        (
            {"use_max_batch_size": True},
            ValueError,
            "use_max_batch_size must be left out, not True: did you mean use_maximum_batch_size",
        ),
        ({"batch_increase_fn": "a.b"}, ValueError, "not 'a.b': did you mean batch_increase_function"),
        (
            {"batch_increase_function": "tiny_torchtune.not_a_function"},
            ValueError,
            "batch_increase_function must be a function, not 3",
        ),
        ({"batchfit": 3, "use_maximum_batch_size": True}, TypeError, "batchfit must be keywords"),
        (
            {"batchfit": {"max_size": 3}, "use_maximum_batch_size": True},
            ValueError,
            "batchfit.max_size must be left out, not 3",
        ),
        *(
            ({"batchfit": given, "use_maximum_batch_size": True}, error, text)
            for given, error, text in [
                ({"bugdet": "20GiB"}, ValueError, "batchfit.bugdet must be a keyword .* mean budget"),
                ({"budget": "twenty"}, ValueError, "must be bytes or text such as '24GiB' .* not 'twenty'"),
                ({"soak_steps": "many"}, ValueError, "soak_steps must be .* not 'many'"),
                ({"strategy": "fast"}, ValueError, "strategy must be .* not 'fast'"),
                ({"tolerance": 2}, ValueError, "tolerance must be .* not 2"),
                ({"key": 3}, ValueError, "key must be a name or None, not 3"),
                ({"store": True}, ValueError, "key must be given to store the answer"),
                ({"store": "yes"}, TypeError, "batchfit.store must be True or False, not 'yes'"),
            ]
        ),
        ({"batchfit": {"budget": "1GiB"}}, ValueError, "use_maximum_batch_size nor batch_increase_function"),
    ],
)
def test_wrong_settings_are_reported_before_anything_is_loaded(
    changes: dict[str, Any], error: type[Exception], text: str, tmp_path: Path
) -> None:
    cfg = OmegaConf.create(tiny_config(tmp_path, "full", **changes))
    with pytest.raises(error, match=text):
        ours.recipe_class("full")(cfg=cfg)


@pytest.mark.parametrize(
    "given",
    [
        {"budget": "4000GiB", "soak_steps": 0},
        {"key": "mine", "fresh": True, "store": True},
        {"strategy": "grow", "start": 4, "attempts": 2, "power_of_two": True},
        {"steps": 2, "max_trials": 3, "time_limit_s": 9.5, "predict": False, "multiple_of": 3},
    ],
)
def test_right_settings_of_the_search_are_kept_and_nothing_is_run(given: Any, tmp_path: Path) -> None:
    changes = {"batchfit": given, "use_maximum_batch_size": True}
    cfg = OmegaConf.create(tiny_config(tmp_path, "full", **changes))
    assert ours.recipe_class("full")(cfg=cfg)._settings.search == given


def test_settings_that_contradict_what_fits(folder: Path, living_bytes: int) -> None:
    config = tiny_config(
        folder,
        "full",
        batch_size=40,
        batch_increase_function="tiny_torchtune.two_more_each_epoch",
        batchfit=QUICK,
    )
    with (
        virtual_memory(living_bytes + 2 * 2**20),
        pytest.raises(ValueError, match=r"batch_size must be at most \d+, the largest that fits, where"),
    ):
        trained(ours.recipe_class("full"), config, train=False)


def test_both_keys_are_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config(
        tmp_path,
        "full",
        use_maximum_batch_size=True,
        batch_increase_function="tiny_torchtune.two_more_each_epoch",
    )
    ours.RecipeSettings(OmegaConf.create(config))
    assert "use_maximum_batch_size and batch_increase_function are both set" in caplog.text


def test_recipes_and_ranks_that_there_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="recipe must be one of full, lora, not 'full_finetune_distributed'"):
        ours.recipe_class("full_finetune_distributed")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="recipe must be run on one device"):
        ours.RecipeSettings(OmegaConf.create(tiny_config(tmp_path, "full")))


def test_an_older_version_is_warned_about() -> None:
    warn_of_version("0.6.1+cpu")
    warn_of_version("0.7.0")
    with pytest.warns(UserWarning, match=r"tested with torchtune 0\.6 and later, and this is 0\.5\.0"):
        warn_of_version("0.5.0")


def test_a_recipe_that_lacks_what_is_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_OVERRIDDEN", ("setup", "_no_such_method"))
    monkeypatch.setattr(ours, "recipe_class", ours.recipe_class.__wrapped__)  # other tests have asked for it
    with pytest.raises(ImportError, match=r"full_finetune_single_device\.py of .* has no _no_such_method"):
        ours.recipe_class("full")


def test_without_torchtune_the_pip_line_is_reported() -> None:
    code = "import sys; sys.modules['torchtune'] = None; import batchfit.integrations.torchtune"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert 'pip install "batchfit[torchtune]" to use batchfit.integrations.torchtune' in done.stderr


@pytest.mark.parametrize(
    "named",
    [
        "batchfit.integrations.torchtune",
        pytest.param("batchfit/integrations/torchtune.py", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_tune_run(named: str, folder: Path) -> None:
    config = tiny_config(folder, "lora", batchfit={**QUICK, "budget": "8MiB"}, max_steps_per_epoch=3)
    file = folder / "config.yaml"
    OmegaConf.save(OmegaConf.create(config), file)
    tune = [sys.executable, "-m", "torchtune._cli.tune"]  # Ray has a command `tune` too
    done = subprocess.run(
        [*tune, "run", named, "--config", str(file), "use_maximum_batch_size=True", "epochs=1"],
        cwd=Path(tiny_torchtune.__file__).parent,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(batchfit.__file__).parent.parent)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    logged = next((folder / "logs").glob("*.txt")).read_text()
    size = int(logged.partition("batch_size:")[2].split()[0])
    assert 3 <= size <= 48
    said = done.stdout + done.stderr
    assert said.count(f"use_maximum_batch_size: batch_size is {size} (the config says 2)") == 1
    assert (folder / "out" / "epoch_0").is_dir()


def test_every_public_name_has_a_sentence() -> None:
    found = public((ours.__name__,))
    assert [gap for address, value in found.items() for gap in gaps(address, value)] == []
