"""`batchfit init`: what is proposed for a program, without torch and without running it."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from batchfit._init.advice import advise

ROOT = Path(__file__).parents[3]
PROGRAMS = sorted(
    path for name in ("examples", "benchmarks", "tests/support") for path in (ROOT / name).rglob("*.py")
)


def added(before: str, after: str) -> list[str]:
    return [line.strip() for line in after.splitlines() if line.strip() and line not in before.splitlines()]


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        (
            "from accelerate.utils import find_executable_batch_size",
            "from batchfit.integrations.accelerate import find_executable_batch_size",
        ),
        (
            "from accelerate.utils import find_executable_batch_size as find, set_seed",
            "from accelerate.utils import set_seed\n"
            "from batchfit.integrations.accelerate import find_executable_batch_size as find",
        ),
        (
            "from accelerate.utils.memory import (\n    find_executable_batch_size,\n)",
            "from batchfit.integrations.accelerate import find_executable_batch_size",
        ),
    ],
)
def test_accelerates_decorator_is_imported_from_here(line: str, changed: str) -> None:
    rest = "\n\n@find_executable_batch_size(starting_batch_size=64)\ndef train(batch_size):\n    pass  # ü\n"
    advice = advise(line + rest, file="train.py")
    assert advice.kind == "accelerate"
    assert advice.text == changed + rest


def test_accelerates_decorator_by_its_module_is_a_note() -> None:
    text = "import accelerate\n@accelerate.utils.find_executable_batch_size\ndef train(batch_size): ...\n"
    advice = advise(text, file="train.py")
    assert (advice.kind, advice.text) == ("accelerate", text)
    assert "import find_executable_batch_size from batchfit.integrations.accelerate" in advice.notes[0]


def test_a_trainer_of_hugging_faces() -> None:
    text = dedent(
        """\
        #!/usr/bin/env python
        from transformers import Trainer as T, TrainingArguments

        def main():
            arguments = TrainingArguments("out", auto_find_batch_size=False)
            trainer = T(
                model, arguments,
            )
            trainer.train()
        """
    )
    advice = advise(text, file="train.py")
    assert advice.kind == "transformers"
    assert added(text, advice.text) == [
        "from batchfit.integrations.transformers import adapt",
        "trainer = adapt(trainer)",
    ]
    assert advice.text.index("trainer = adapt") < advice.text.index("trainer.train()")
    assert advice.notes == ()


def test_a_trainer_with_an_annotation() -> None:
    text = "from transformers import Trainer\ntrainer: Trainer = Trainer(m)\ntrainer.train()\n"
    lines = advise(text, file="train.py").text.splitlines()
    assert lines[2:] == ["trainer: Trainer = Trainer(m)", "trainer = adapt(trainer)", "trainer.train()"]


@pytest.mark.parametrize(
    ("lines", "more"),
    [
        ("from trl import SFTTrainer\nt = SFTTrainer(m)", "t = adapt(t)"),
        ("from trl import DPOTrainer as D\nclass U(D): ...\nt = U(m)", "t = adapt(t)"),
        ("from trl.experimental.orpo import ORPOTrainer\nt = ORPOTrainer(m)", "t = adapt(t)"),
    ],
)
def test_trainers_of_trl(lines: str, more: str) -> None:
    advice = advise(f"{lines}\n", file="train.py")
    assert added(f"{lines}\n", advice.text) == ["from batchfit.integrations.transformers import adapt", more]
    assert advice.notes == ()


@pytest.mark.parametrize(
    ("lines", "more"),
    [
        ("class Mine(Trainer): ...\ntrainer = Mine(m)", "trainer = adapt(trainer)"),
        ("class Last(Mine): ...\nclass Mine(Trainer): ...\nt = Last(m)", "t = adapt(t)"),
        ("import transformers as hf\nself.trainer = Trainer(m)", "self.trainer = adapt(self.trainer)"),
    ],
)
def test_trainers_of_the_users_own(lines: str, more: str) -> None:
    text = f"from transformers import Trainer\n{lines}\n"
    advice = advise(text, file="train.py")
    assert added(text, advice.text) == ["from batchfit.integrations.transformers import adapt", more]
    assert advice.notes == ()


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("from transformers import Trainer\nTrainer(m).train()\n", "line 2: give the trainer to adapt()"),
        (
            "from transformers import Trainer\ndef make():\n    return Trainer(m)\n",
            "line 3: give the trainer",
        ),
        (
            "from trl.experimental.gkd import GKDTrainer\nt = GKDTrainer(m)\n",
            "line 2: GKDTrainer is not in batchfit's tests",
        ),
        (
            "from setfit import SetFitTrainer as T\nclass U(T): ...\nt = U(m)\n",
            "line 3: U is not in batchfit's tests",
        ),
        (
            "from lightning.pytorch.cli import LightningCLI\nLightningCLI(M)\n",
            "line 2: its Trainer comes from",
        ),
    ],
)
def test_a_trainer_that_cannot_be_reached_is_a_note(text: str, note: str) -> None:
    advice = advise(text, file="train.py")
    assert advice.text == text
    assert advice.notes[0].startswith(note)


@pytest.mark.parametrize(
    ("call", "changed"),
    [
        ("TrainingArguments(auto_find_batch_size=True)", "TrainingArguments()"),
        ("TrainingArguments('ü', auto_find_batch_size=True)", "TrainingArguments('ü')"),
        ("TrainingArguments(auto_find_batch_size=True, seed=1)", "TrainingArguments(seed=1)"),
        (
            "TrainingArguments(\n    'out',\n    auto_find_batch_size=True,\n)",
            "TrainingArguments(\n    'out',\n)",
        ),
        (
            "TrainingArguments(\n    'out',\n    auto_find_batch_size=True\n)",
            "TrainingArguments(\n    'out',\n)",
        ),
        (
            "SFTConfig('out', auto_find_batch_size=True,\n    seed=1)",
            "SFTConfig('out',\n    seed=1)",
        ),
        ("SFTConfig('out',\n    auto_find_batch_size=True)", "SFTConfig('out',\n    )"),
    ],
)
def test_their_own_search_is_taken_out(call: str, changed: str) -> None:
    start = "from transformers import Trainer, TrainingArguments\n"
    text = f"{start}trainer = Trainer(model, args={call})\n"
    new = "from batchfit.integrations.transformers import adapt\n"
    advice = advise(text, file="train.py")
    assert advice.text == f"{start}{new}trainer = Trainer(model, args={changed})\ntrainer = adapt(trainer)\n"
    assert advice.notes == ()


@pytest.mark.parametrize(
    "line",
    [
        "arguments.auto_find_batch_size = True",
        "arguments = TrainingArguments('out', auto_find_batch_size=options.auto)",
        "arguments = TrainingArguments(**{'auto_find_batch_size': True})",
        "parser.parse_args(['--auto_find_batch_size'])",
        "arguments = made(auto_find_batch_size=True)",
    ],
)
def test_where_their_own_search_cannot_be_taken_out_nothing_is_added(line: str) -> None:
    text = f"from transformers import Trainer\n{line}\ntrainer = Trainer(model, arguments)\n"
    advice = advise(text, file="train.py")
    assert (advice.kind, advice.text) == ("transformers", text)
    assert "line 2: take auto_find_batch_size out" in advice.notes[0]


@pytest.mark.parametrize(
    ("call", "changed"),
    [
        ("pl.Trainer()", "pl.Trainer(callbacks=[BatchSizeFinder()])"),
        ("pl.Trainer(max_epochs=3)", "pl.Trainer(max_epochs=3, callbacks=[BatchSizeFinder()])"),
        ("pl.Trainer(max_epochs=3,)", "pl.Trainer(max_epochs=3, callbacks=[BatchSizeFinder()],)"),
        (
            "pl.Trainer(\n    logger='ü',\n)",
            "pl.Trainer(\n    logger='ü', callbacks=[BatchSizeFinder()],\n)",
        ),
        ("pl.Trainer(callbacks=[Stop()])", "pl.Trainer(callbacks=[BatchSizeFinder(), Stop()])"),
        ("pl.Trainer(callbacks=[])", "pl.Trainer(callbacks=[BatchSizeFinder()])"),
    ],
)
def test_a_trainer_of_lightnings(call: str, changed: str) -> None:
    text = f'"""Doc."""\n\nimport pytorch_lightning as pl\n\ntrainer = {call}\n'
    advice = advise(text, file="train.py")
    assert advice.kind == "lightning"
    new = "import pytorch_lightning as pl\nfrom batchfit.integrations.lightning import BatchSizeFinder\n"
    assert advice.text == f'"""Doc."""\n\n{new}\ntrainer = {changed}\n'


@pytest.mark.parametrize("call", ["Trainer(callbacks=made)", "Trainer(**options)"])
def test_callbacks_that_cannot_be_read_are_a_note(call: str) -> None:
    text = f"from lightning import Trainer\ntrainer = {call}\n"
    advice = advise(text, file="train.py")
    assert advice.text == text
    assert "BatchSizeFinder()" in advice.notes[0]


def test_lightnings_own_finder_gives_way_to_ours() -> None:
    text = dedent(
        """\
        import lightning as L
        from lightning.pytorch.callbacks import BatchSizeFinder as Finder, Timer

        trainer = L.Trainer(callbacks=[Finder(mode="binsearch", init_val=4), Timer()])
        """
    )
    advice = advise(text, file="train.py")
    new = "from batchfit.integrations.lightning import BatchSizeFinder as Finder"
    old = "from lightning.pytorch.callbacks import BatchSizeFinder as Finder, Timer"
    assert advice.text == text.replace(old, f"from lightning.pytorch.callbacks import Timer\n{new}")
    assert advise(advice.text, file="train.py").text == advice.text


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("class Mine(pl.callbacks.BatchSizeFinder):\n    pass", "derives from Lightning's BatchSizeFinder"),
        (
            "from pytorch_lightning.callbacks import BatchSizeFinder\nclass Mine(BatchSizeFinder):\n    pass",
            "derives from Lightning's BatchSizeFinder",
        ),
        ("finder = pl.callbacks.BatchSizeFinder()", "import BatchSizeFinder from batchfit"),
        ("from mine import BatchSizeFinder\nfinder = BatchSizeFinder()", "of another kind"),
        # the rest of that line would be lost
        ("import os; from pytorch_lightning.callbacks import BatchSizeFinder\nBatchSizeFinder()", "keep one"),
        ("Tuner(trainer).scale_batch_size(model)", "take scale_batch_size out"),
    ],
)
def test_a_second_finder_is_not_added(lines: str, why: str) -> None:
    text = f"import pytorch_lightning as pl\n{lines}\ntrainer = pl.Trainer()\n"
    advice = advise(text, file="train.py")
    assert (advice.kind, advice.text) == ("lightning", text)
    assert why in advice.notes[0]


LOOP = """\
import torch

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for {target} in {loader}:
{body}
"""


def loop(body: str, target: str = "x, y", loader: str = "loader") -> str:
    lines = dedent(body).strip("\n").splitlines()
    return LOOP.format(
        target=target, loader=loader, body="\n".join(f"        {line}".rstrip() for line in lines)
    )


@pytest.mark.parametrize(
    ("target", "loader", "given"),
    [
        ("x, y", "loader", "(x, y)"),
        ("[x, y]", "loader", "(x, y)"),
        ("step, (x, y)", "enumerate(loader)", "(x, y)"),
        ("step, (x, y)", "tqdm(enumerate(loader, 1))", "(x, y)"),
    ],
)
def test_a_loop_by_hand(target: str, loader: str, given: str) -> None:
    text = loop(
        """
        # to the device
        x = x.cuda()
        optimizer.zero_grad()
        loss = criterion(model(x), y)

        loss.backward()
        optimizer.step()
        print(loss.item())
        """,
        target,
        loader,
    )
    advice = advise(text, file="train.py")
    assert advice.kind == "loop"
    assert advice.text == text.replace("import torch\n", "import torch\nimport batchfit\n", 1).replace(
        "for epoch", "mb = batchfit.Microbatcher(model)\nfor epoch", 1
    ).replace(
        """\
        x = x.cuda()
        optimizer.zero_grad()
        loss = criterion(model(x), y)

        loss.backward()
""",
        f"""\
        optimizer.zero_grad()

        def loss_of(batch):
            x, y = batch
            x = x.cuda()
            loss = criterion(model(x), y)
            return loss

        loss = mb.backward(loss_of, {given}).loss
""",
    )


def test_a_loop_with_a_scaler_and_a_dictionary() -> None:
    text = loop(
        """
        batch = {name: value.cuda() for name, value in batch.items()}
        with torch.autocast("cuda"):
            loss = model(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        """,
        target="batch",
    )
    advice = advise(text, file="train.py")
    assert "def loss_of(batch):" in advice.text
    assert "loss = mb.backward(loss_of, batch, scaler=scaler).loss" in advice.text


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("out = model(x)\nloss = out.mean()\nloss.backward()\nprint(out)", "out is used after backward"),
        ("if bad(x):\n    continue\nloss = model(x).mean()\nloss.backward()", "may leave the loop"),
        ("hidden = cell(x, hidden)\nloss = model(hidden).mean()\nloss.backward()", "hidden is carried"),
        ("loss = model(x).mean()\nloss.backward()\nother.backward()", "backward more than once"),
        ("z = next(others)\nloss = model(x, z).mean()\nloss.backward()", "takes more than this batch"),
        ("optimizer.step()\nloss = model(x).mean()\nloss.backward()", "takes more than this batch, or steps"),
        ("net(x).mean().backward()", "backward is not called on a variable"),
        ("loss = net(x).mean()\nloss.backward()", "no optimizer is given the parameters of a model"),
        ("loss.backward()", "loss is not computed in it"),
        ("x = x / 2\nloss = model(x).mean()\nloss.backward()\nprint(x)", "x is changed before backward"),
        ("loss = model(x).mean()\nx = x.cpu()\nloss.backward()\nprint(x)", "line 8 does something besides"),
        (
            "z = x + 1\nx = x.cpu()\nloss = model(z).mean()\nloss.backward()\nprint(x)",
            "line 8 does something",
        ),
        ("a = 1; loss = model(x).mean()\nloss.backward()", "share lines"),
        ('loss = model(x, """a\nb""").mean()\nloss.backward()', "share lines"),
        ("model = make()\nloss = model(x).mean()\nloss.backward()", "its model is made in"),
        (
            "net = make()\nopt = SGD(net.parameters())\nloss = net(x).mean()\nloss.backward()",
            "its model is made in",
        ),
    ],
)
def test_a_loop_that_would_mean_something_else_is_left_alone(body: str, why: str) -> None:
    text = loop(body)
    advice = advise(text, file="train.py")
    assert (advice.kind, advice.text) == ("loop", text)
    assert why in advice.notes[0]


@pytest.mark.parametrize(
    ("target", "loader", "why"),
    [
        ("step", "range(5)", "it counts, and its batch is made in it"),
        ("step", "tqdm(range(5))", "it counts, and its batch is made in it"),
        ("step", "itertools.count()", "it counts, and its batch is made in it"),
        ("step, batch", "zip(range(5), loader)", "it counts, and its batch is made in it"),
        ("step", "steps", "what computes the loss does not read step"),
        ("a, b", "steps", "what computes the loss does not read a or b"),
    ],
)
def test_a_loop_over_something_else_than_batches_is_left_alone(target: str, loader: str, why: str) -> None:
    text = loop("x, y = get_batch()\nloss = criterion(model(x), y)\nloss.backward()", target, loader)
    advice = advise(text, file="train.py")
    assert (advice.kind, advice.text) == ("loop", text)
    assert why in advice.notes[0]


BESIDES = "does something besides computing the loss"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        # after the loss, but before backward: neither in the function nor before it
        ("loss = model(x).mean()\nif step % 2 == 0:\n    optimizer.zero_grad()\nloss.backward()", 9),
        ("loss = model(x).mean()\nfor p in model.parameters():\n    p.grad = None\nloss.backward()", 9),
        ("loss = model(x).mean()\nseen[0] = seen[0] + 1\nloss.backward()", 8),
        ("loss = model(x).mean()\nlosses.append(loss)\nloss.backward()", 8),
        ("loss = model(x).mean()\nlosses.append(loss.sum().item())\nloss.backward()", 8),
        ("loss = model(x).mean()\nmeter.update(x)\nloss.backward()", 8),
        ("loss = model(x).mean()\nema.update()\nloss.backward()", 8),
        ("loss = model(x).mean()\nprint(model.weight.grad, loss.item())\nloss.backward()", 8),
        ("loss = model(x).mean()\nprint(weight.grad, loss.item())\nloss.backward()", 8),
        ("loss = model(x).mean()\nloss += 1\nloss.backward()", 8),
        ("loss = model(x * scale).mean()\nscale += loss.item()\nloss.backward()", 8),
        ("loss = model(x).mean()\nhook.run(loss.item())\nloss.backward()", 8),
        ("loss = model(x).mean()\nself.losses.append(loss.item())\nloss.backward()", 8),
        ("loss = model(x).mean()\ndel x\nloss.backward()", 8),
        # among what computes it
        ("out = model(x)\nmeter.update(out)\nloss = out.mean()\nloss.backward()", 8),
        ("out = model(x)\nseen += 1\nloss = out.mean()\nloss.backward()", 8),
        (
            "with amp():\n    out = model(x)\n    meter.update(1)\n    loss = out.mean()\nloss.backward()",
            9,
        ),
        (
            "try:\n    loss = model(x).mean()\nexcept OSError:\n    loss = model(x).sum()\nloss.backward()",
            7,
        ),
        # where their result is used
        ("loss = model(batch.pop('x'), x).mean()\nloss.backward()", 7),
        ("loss = model(x.mul_(2)).mean()\nloss.backward()", 7),
        ("loss = relu(model(x), inplace=True).mean()\nloss.backward()", 7),
        ("loss = add(model(x), y, out=buffer).mean()\nloss.backward()", 7),
        ("out.value = model(x)\nloss = out.value.mean()\nloss.backward()", 7),
        ("kept['mask'] = x > 0\nloss = (model(x) * kept['mask']).mean()\nloss.backward()", 7),
        # before it, and the batch may be none after it
        ("x = x.transpose(0, 1)\nmeter.update(1)\nloss = model(x).mean()\nloss.backward()", 8),
        ("x.transpose_(0, 1)\nloss = model(x).mean()\nloss.backward()", 7),
        ("x['n'] = 1\nloss = model(x).mean()\nloss.backward()", 7),
        ("prepare(x)\nloss = model(x).mean()\nloss.backward()", 7),
    ],
)
def test_what_does_more_than_compute_the_loss_is_not_moved(body: str, line: int) -> None:
    text = loop(body)
    advice = advise(text, file="train.py")
    assert (advice.kind, advice.text) == ("loop", text)
    assert f"line {line} {BESIDES}" in advice.notes[0]


@pytest.mark.parametrize(
    "head",
    [
        "if step % 2 == 0:\n    optimizer.zero_grad()",
        "for p in model.parameters():\n    p.grad = None",
        "with torch.no_grad():\n    for a, b in zip(old, new):\n        a.mul_(0.9).add_(b, alpha=0.1)",
        "x, y = x.cuda(), y.to(device)\nmeter.update(len(x))",
        "optimizer.zero_grad()\nseen += len(x)",
        "seen[0] = seen[0] + len(x)",
        "writer.add_scalar('step', step)",
    ],
)
def test_what_does_something_else_stays_before_the_function(head: str) -> None:
    tail = "loss = criterion(model(x), y)\nloss.backward()\noptimizer.step()"
    text = loop(f"{head}\n{tail}", "step, (x, y)", "enumerate(loader)")
    changed = advise(text, file="train.py").text
    stays = "\n".join(f"        {line}" for line in head.splitlines())
    assert (
        f"enumerate(loader):\n{stays}\n\n        def loss_of(batch):\n            x, y = batch\n" in changed
    )
    assert "            loss = criterion(model(x), y)\n            return loss\n" in changed


@pytest.mark.parametrize(
    "tail",
    [
        "losses.append(loss.item())",
        "total += loss.item() * len(x)\n# to see it\nwriter.add_scalar('loss', loss.item(), step)",
        "meter.update(loss.item(), n=len(x))",
        "print(f'{step}: {float(loss):.3f}')",
    ],
)
def test_what_notes_the_loss_comes_after_it(tail: str) -> None:
    body = f"loss = model(x).mean() * step\n{tail}\noptimizer.zero_grad()\nloss.backward()\noptimizer.step()"
    text = loop(body, "step, (x, y)", "enumerate(loader)")
    changed = advise(text, file="train.py").text
    after = "\n".join(f"        {line}" for line in tail.splitlines())
    assert f"        loss = mb.backward(loss_of, (x, y)).loss\n{after}\n        optimizer.step()\n" in changed
    assert "            loss = model(x).mean() * step\n            return loss\n" in changed
    assert changed.index("optimizer.zero_grad()") < changed.index("def loss_of")


@pytest.mark.parametrize(
    ("line", "refused"),
    [
        ("seen.append(1)", True),
        ("x[0] = 0", True),
        ("x += 1", True),
        ("global count", True),
        ("print(x)", True),
        ("_ = next(others)", True),
        ("y = z", True),  # the z of the loop
        ("found = []\n    found.append(x)", False),
        ("kept = {}\n    kept['a'] = x", False),
        ("model.eval()", False),
    ],
)
def test_functions_that_compute_the_loss_are_read(line: str, refused: bool) -> None:
    function = (
        f"def inner(x):\n    {line}\n    return model(x)\n\ndef outer(x):\n    return inner(x).mean()\n\n"
    )
    text = loop("loss = outer(x) + z.mean()\nloss.backward()", target="x, z")
    text = text.replace("for epoch", function + "for epoch", 1).replace("loss = ", "loss = model(x).sum() + ")
    advice = advise(text, file="train.py")
    assert (advice.text == text) is refused
    assert (f"inner, line 6, {BESIDES}" in advice.notes[0]) is refused


def test_what_is_used_after_the_loop_or_in_the_next_turn_stays() -> None:
    text = loop("print(out)\nout = model(x)\nloss = out.mean()\nloss.backward()")
    assert "out is carried from one batch to the next" in advise(text, file="train.py").notes[0]
    text = loop("out = model(x)\nloss = out.mean()\nloss.backward()") + "    else:\n        print(out)\n"
    assert "out is used after backward" in advise(text, file="train.py").notes[0]


@pytest.mark.parametrize(
    "after", ["print(len(x))", "seen += len(x)", "if step % 9 == 0:\n    print(y)", "meter(x, loss.item())"]
)
def test_a_batch_that_is_used_later_goes_to_the_device_as_a_whole(after: str) -> None:
    body = (
        "x, y = x.to(device), y.to(device)\noptimizer.zero_grad()\nloss = f(model(x), y)\nloss.backward()\n"
    )
    advice = advise(loop(body + after, "step, (x, y)", "enumerate(loader)"), file="train.py")
    lines = [line.strip() for line in advice.text.splitlines()]
    first = lines.index("x, y = x.to(device), y.to(device)")
    assert first < lines.index("optimizer.zero_grad()") < lines.index("def loss_of(batch):")
    assert lines.index("return loss") < lines.index("loss = mb.backward(loss_of, (x, y)).loss")


BODY = """\
import torch

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
{first}    for x, y in loader:
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
{rest}"""


@pytest.mark.parametrize(
    ("rest", "is_read"),
    [
        ("    for x, y in other:\n        out = model(x)\n        print(out)\n", False),
        (
            "    model.eval()\n    with torch.no_grad():\n        out, _ = model(z), 1\n    print(out)\n",
            False,
        ),
        ("    if epoch:\n        out = 1\n    else:\n        out = 2\n    print(out)\n", False),
        ("    while epoch:\n        out = f()\n        epoch = g(out)\n", False),
        ("    [out, *_] = f()\nprint(out)\n", False),
        ("    out: int = 1\n    print(out)\n", True),  # not distinguished from a mere annotation
        ("    for x, y in other:\n        print(out)\n        out = model(x)\n", True),
        ("    for x, y in other:\n        out = model(x)\nprint(out)\n", True),  # `other` may be empty
        ("    if epoch:\n        out = 1\n    print(out)\n", True),
        ("    out = out + 1\n", True),
        ("    out += 1\n", True),
        ("    del out\n", True),
        ("    try:\n        out = f()\n    finally:\n        print(out)\n", True),
        ("    out = f(lambda: out)\n", True),
        ("def later():\n    print(out)\n", True),
        ("    if epoch:\n        continue\n    out = 1\n    print(out)\n", True),
        ("    out = 1\n    print(locals(), out)\n", True),
        ("print([out for out in out])\n", True),
        ("", False),
    ],
)
def test_what_is_set_again_before_it_is_read_is_another_one(rest: str, is_read: bool) -> None:
    text = BODY.format(first="", rest=rest)
    advice = advise(text, file="train.py")
    assert (advice.text == text) is is_read
    assert ("out is used after backward" in advice.notes[0]) is is_read


@pytest.mark.parametrize(
    ("first", "is_read"), [("    print(out)\n", True), ("    out = 1\n    print(out)\n", False)]
)
def test_what_the_next_epoch_reads_is_read_after_the_loop(first: str, is_read: bool) -> None:
    text = BODY.format(first=first, rest="")
    assert (advise(text, file="train.py").text == text) is is_read


ACCELERATE = """\
import torch
from accelerate import Accelerator

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for x, y in loader:
    with accelerator.accumulate(model):
        out = model(x)
        loss = criterion(out, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(accelerator.gather(loss))
"""


def test_a_loop_of_accelerates() -> None:
    advice = advise(ACCELERATE, file="train.py")
    assert advice.kind == "loop"
    assert advice.text == ACCELERATE.replace(
        "import Accelerator\n",
        "import Accelerator\nimport batchfit\nfrom batchfit.integrations.accelerate import backward\n",
    ).replace("for x, y", "mb = batchfit.Microbatcher(model)\nfor x, y").replace(
        """\
        out = model(x)
        loss = criterion(out, y)
        accelerator.backward(loss)
""",
        """\
        def loss_of(batch):
            x, y = batch
            out = model(x)
            loss = criterion(out, y)
            return loss

        loss = backward(accelerator, mb, loss_of, (x, y)).loss
""",
    )
    assert advise(advice.text, file="train.py").text == advice.text


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            "accelerator = Accelerator(gradient_accumulation_steps=2)",
            "accelerator = make()",
            "not called on a var",
        ),
        ("print(accelerator.gather(loss))", "print(out)", "out is used after backward"),
        (
            "accelerator.backward(loss)",
            "accelerator.backward(loss, retain_graph=True)",
            "not called on a var",
        ),
    ],
)
def test_a_loop_of_accelerates_that_would_mean_something_else_is_left_alone(
    old: str, new: str, why: str
) -> None:
    text = ACCELERATE.replace(old, new)
    advice = advise(text, file="train.py")
    assert (advice.kind, advice.text) == ("loop", text)
    assert why in advice.notes[0]


def test_our_backward_takes_another_name_where_it_is_taken() -> None:
    text = ACCELERATE.replace("    print(", "    backward = print(")
    advice = advise(text, file="train.py")
    assert "import backward as backward_\n" in advice.text
    assert "loss = backward_(accelerator, mb, loss_of, (x, y)).loss" in advice.text


def test_a_model_made_in_the_outer_loop_has_its_microbatcher_there() -> None:
    text = "for fold in folds:\n    model = make()\n    optimizer = SGD(model.parameters())\n"
    text += "    for x in loader:\n"
    text += "        loss = model(x).mean()\n        loss.backward()\n        optimizer.step()\n"
    lines = advise(text, file="train.py").text.splitlines()
    assert lines.index("    mb = batchfit.Microbatcher(model)") == lines.index("    for x in loader:") - 1


CONFIG = """\
# a config
model:
  _component_: torchtune.models.llama3.lora_llama3_8b
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
dataset:
  _component_: torchtune.datasets.alpaca_dataset
optimizer:
  _component_: torch.optim.AdamW
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
batch_size: 2  # of one step
epochs: 1
"""


def test_a_config_of_torchtunes() -> None:
    advice = advise(CONFIG, file="lora.yaml")
    assert advice.kind == "torchtune"
    assert advice.text == CONFIG.replace(
        "# of one step\n", "# of one step\nrecipe: lora\nuse_maximum_batch_size: True\n"
    )
    assert advice.notes == ("run it with: tune run batchfit.integrations.torchtune --config lora.yaml",)
    assert "recipe: full\n" in advise(CONFIG.replace("lora_", ""), file="full.yml").text
    assert advise("a: 1\n", file="other.yaml").kind == "none"


RUN = "# Config for tests\n#   tune run {} --config llama3/8B\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (CONFIG.replace("dataset:\n", "datasets:\n"), "it has no dataset"),
        (CONFIG.replace("tokenizer:\n", "reader:\n"), "it has no tokenizer"),
        (CONFIG.replace("optimizer:\n", "tasks:\n"), "it has no optimizer"),
        (CONFIG.replace("loss:\n", "log:\n"), "it has no loss"),
        (CONFIG.replace("epochs:", "steps:"), "it has no epochs"),
        (CONFIG + "teacher_checkpointer:\n  a: 1\n", "it has a teacher_checkpointer"),
        (CONFIG + "quantizer:\n  a: 1\n", "it has a quantizer"),
        (
            CONFIG.replace("modules.loss.CEWithChunkedOutputLoss", "rlhf.loss.DPOLoss"),
            "it uses torchtune.rlhf",
        ),
        (
            RUN.format("--nnodes 1 --nproc_per_node 2 lora_finetune_distributed") + CONFIG,
            "lora_finetune_distri",
        ),
        (RUN.format("lora_dpo_single_device") + CONFIG, "its comments name lora_dpo_single_device"),
        ("# for full_finetune_distributed.py\n" + CONFIG, "its comments name full_finetune_distributed"),
    ],
)
def test_a_config_of_another_recipe_of_torchtunes_is_left_alone(text: str, why: str) -> None:
    advice = advise(text, file="other.yaml")
    assert (advice.kind, advice.text) == ("none", text)
    assert why in advice.notes[0]


@pytest.mark.parametrize(
    "comment",
    [
        RUN.format("lora_finetune_single_device"),
        RUN.format("batchfit.integrations.torchtune"),
        "# from lora_finetune_single_device.py, once lora_finetune_distributed.py\n",
        "# from 8B_lora_single_device.yaml\n",
    ],
)
def test_a_config_whose_comments_name_our_recipes_is_changed(comment: str) -> None:
    assert "recipe: lora\n" in advise(comment + CONFIG, file="ours.yaml").text


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_what_is_proposed_for_real_programs_parses_and_is_proposed_once(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    once = advise(text, file=path.name)
    ast.parse(once.text)
    assert advise(once.text, file=path.name).text == once.text


# --- the command


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "batchfit", "init", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_shows_a_diff_and_writes_only_when_asked(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    body = "x = x.cuda()\nloss = model(x).mean()\nloss.backward()\noptimizer.step()"
    text = loop(body).rstrip("\n")
    file.write_bytes(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    os.chmod(file, 0o750)
    before = file.read_bytes()
    shown = run(file)
    assert shown.returncode == 0, shown.stderr
    assert file.read_bytes() == before
    assert "+        loss = mb.backward(loss_of, (x, y)).loss" in shown.stdout
    assert "nothing is written without --write" in shown.stderr
    written = run(file, "--write")
    assert written.stdout == shown.stdout
    after = file.read_bytes()
    assert after.startswith(b"\xef\xbb\xbfimport torch\r\nimport batchfit\r\n")
    assert after.count(b"\n") == after.count(b"\r\n")
    assert not after.endswith(b"\n")
    assert file.stat().st_mode & 0o777 == 0o750
    again = run(file, "--write")
    assert (again.returncode, again.stdout, file.read_bytes()) == (0, "", after)
    assert "there is nothing to change" in again.stderr


def test_git_takes_the_diff(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(loop("loss = model(x).mean()\nloss.backward()"))
    shown = subprocess.run(
        [sys.executable, "-m", "batchfit", "init", "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    subprocess.run(["git", "apply"], cwd=tmp_path, input=shown.stdout, text=True, check=True)
    assert file.read_text() == advise(loop("loss = model(x).mean()\nloss.backward()"), file="train.py").text


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"for x in\n", "must be a program that Python can read: line 1"),
        (b"\xff\xfe", "it is not UTF-8"),
        (None, "No such file"),
    ],
)
def test_what_cannot_be_read_is_bad_usage(content: bytes | None, text: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    if content is not None:
        file.write_bytes(content)
    done = run(file)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stdout == ""


class TestWhereTheImportGoes:
    """Below what the program does before it imports the package that ours loads: it behaves the same."""

    TRAINER = "from transformers import Trainer, TrainingArguments\n"

    @pytest.mark.parametrize(
        "before",
        [
            'import os\nos.environ["HF_HOME"] = "/data"\n',
            '"""Doc."""\nimport os, sys\nsys.path.insert(0, "lib")\nos.environ["A"] = "0"\nimport torch\n',
            "import logging\nlogging.basicConfig()\n",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from transformers import A\nset_up()\n",
        ],
    )
    def test_below_the_programs_own_import(self, before: str) -> None:
        rest = "\ntrainer = Trainer(None)\n"
        advice = advise(before + self.TRAINER + rest, file="train.py")
        ours = "from batchfit.integrations.transformers import adapt\n"
        assert advice.text == before + self.TRAINER + ours + rest + "trainer = adapt(trainer)\n"
        again = advise(advice.text, file="train.py")
        assert again.text == advice.text

    def test_below_a_try_and_not_in_it(self) -> None:
        text = "try:\n    from transformers import Trainer\nexcept ImportError:\n    raise\nt = Trainer()\n"
        lines = advise(text, file="train.py").text.splitlines()
        assert lines[4] == "from batchfit.integrations.transformers import adapt"

    def test_in_the_function_that_imports(self) -> None:
        text = dedent(
            """\
            def main():
                import os
                os.environ["CUDA_VISIBLE_DEVICES"] = "1"
                import lightning as L

                trainer = L.Trainer(max_epochs=2)
            """
        )
        lines = advise(text, file="train.py").text.splitlines()
        assert lines[4] == "    from batchfit.integrations.lightning import BatchSizeFinder"

    def test_of_a_loop(self) -> None:
        before = 'import os\nos.environ["CUDA_VISIBLE_DEVICES"] = "1"\nimport torch\nfrom torch import nn\n'
        loop = dedent(
            """\

            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x, y in loader:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                optimizer.step()
            """
        )
        assert advise(before + loop, file="train.py").text.startswith(before + "import batchfit\n")
