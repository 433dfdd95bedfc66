"""`batchfit init`: what to add to a program so that it uses batchfit.

Rules
- The program is read, never run: Python through `ast`, configs line by line.
- A change is made only where it is certain to keep the program's meaning; otherwise a note says what to do.
- Only lines that must change do: the rest stays byte for byte. What comes out parses, or nothing is proposed.
- Proposing again for what was proposed changes nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Final, Literal, final

from batchfit._init.edits import Edit, edited, import_edits, is_tidy
from batchfit._init.loop import loop_edits

Kind = Literal["accelerate", "lightning", "transformers", "loop", "torchtune", "none"]
# `tune run --nproc_per_node 2 lora_finetune_distributed`, and a recipe named without the command.
_TUNE_RUN: Final = re.compile(r"\btune run[ \t]+(?:--?[\w-]+[ \t=][^\s-]\S*[ \t]+)*([\w./-]+)")
_TUNE_NAME: Final = re.compile(r"\b(\w*(?:finetune|dpo|qat|distillation)_(?:distributed|single_device))\b")
_TUNE_OURS: Final = {"full_finetune_single_device", "lora_finetune_single_device"}
_TRAINERS: Final = {  # by package: those that are in batchfit's tests
    "transformers": ("Trainer", "Seq2SeqTrainer"),
    "trl": (
        *("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer", "ORPOTrainer", "CPOTrainer"),
        *("GRPOTrainer", "RLOOTrainer"),
    ),
}
_MORE_TRAINERS: Final = ("trl", "sentence_transformers", "setfit")  # most of theirs derive from it


@final
@dataclass(frozen=True, slots=True)
class Advice:
    """The program as it would be, which trainer it has, and what else there is to say."""

    kind: Kind
    text: str
    notes: tuple[str, ...] = ()


def advise(text: str, *, file: str) -> Advice:
    """What to change in the program or config `file` that reads `text`. A `SyntaxError` is the program's."""
    if file.endswith((".yaml", ".yml")):
        return _advise_config(text, file)
    tree = ast.parse(text, filename=file)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("batchfit.integrations."):
            return Advice("none", text, (f"it uses {node.module} already: nothing to add",))
    looks: tuple[Callable[[ast.Module, str], Advice | None], ...] = (
        _accelerate,
        _transformers,
        _lightning,
        _loop,
    )
    for look in looks:
        advice = look(tree, text)
        if advice is None:
            continue
        try:
            ast.parse(advice.text)
        except SyntaxError:  # a layout that we do not know: better nothing than a broken program
            return replace(advice, text=text, notes=(*advice.notes, "no change could be made safely"))
        return advice
    note = "no training loop, Trainer or find_executable_batch_size was found in it"
    return Advice("none", text, (note,))


# --- frameworks


def _accelerate(tree: ast.Module, text: str) -> Advice | None:
    name = "find_executable_batch_size"
    edits = _imports_from_here(tree, text, ("accelerate",), name, "accelerate")
    if edits:
        return Advice("accelerate", edited(text, edits))
    uses = any(isinstance(node, ast.Attribute) and node.attr == name for node in ast.walk(tree))
    if uses and "accelerate" in _imported(tree):
        note = f"import {name} from batchfit.integrations.accelerate in place of accelerate.utils"
        return Advice("accelerate", text, (note,))
    return None


def _transformers(tree: ast.Module, text: str) -> Advice | None:
    ours, others = _trainer_names(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    made = [call for call in calls if _called(call) in ours]
    notes = [
        f"line {call.lineno}: {_called(call)} is not in batchfit's tests. Where it derives from Trainer of "
        "transformers, adapt(trainer) of batchfit.integrations.transformers before train() may do"
        for call in calls
        if _called(call) in others
    ]
    if not made:
        return Advice("transformers", text, tuple(notes)) if notes else None
    edits: list[Edit] = []
    assigned: dict[int, tuple[ast.stmt, list[ast.expr]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets: list[ast.expr] = [*node.targets] if isinstance(node, ast.Assign) else [node.target]
            assigned[id(node.value)] = node, targets
    for call in made:
        statement, targets = assigned.get(id(call), (None, []))
        if statement is None or len(targets) != 1 or not _is_path(targets[0]):
            notes.append(f"line {call.lineno}: give the trainer to adapt() before it trains")
        else:
            name = ast.unparse(targets[0])
            edits.append(Edit.after(statement, [f"{name} = adapt({name})"]))
    taken, lines = _without_their_search(tree, text)
    if lines:  # adapt() refuses such a trainer
        where = ", ".join(str(line) for line in lines)
        note = f"line {where}: take auto_find_batch_size out, then run this again; batchfit refuses it"
        return Advice("transformers", text, (note,))
    if edits:
        line = "from batchfit.integrations.transformers import adapt"
        edits += [*taken, *import_edits(tree, text, line, after=("transformers", "trl"))]
    elif taken:
        notes.append("take auto_find_batch_size out; batchfit refuses it beside its own search")
    return Advice("transformers", edited(text, edits), tuple(notes))


def _trainer_names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """What makes a Trainer of Hugging Face's: their classes and those derived from them; those of others."""
    ours = {f"transformers.{name}" for name in _TRAINERS}
    others: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom):
            continue
        package = (node.module or "").split(".")[0]
        for alias in node.names:
            name = alias.asname or alias.name
            if alias.name in _TRAINERS.get(package, ()):
                ours.add(name)
            elif package in _MORE_TRAINERS and alias.name.endswith("Trainer"):
                others.add(name)
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for _ in classes:  # one may derive from another that comes later
        for known in (ours, others):
            known |= {one.name for one in classes if any(ast.unparse(base) in known for base in one.bases)}
    return ours, others


def _is_path(target: ast.expr) -> bool:
    """`trainer`, `self.trainer`."""
    return isinstance(target, ast.Name) or (isinstance(target, ast.Attribute) and _is_path(target.value))


def _without_their_search(tree: ast.Module, text: str) -> tuple[list[Edit], list[int]]:
    """The edits that take `auto_find_batch_size=True` out; the lines where it is set in another way."""
    name = "auto_find_batch_size"
    edits: list[Edit] = []
    lines: list[int] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            of_theirs = _called(node).endswith(("TrainingArguments", "Config"))
            for keyword in node.keywords:
                if keyword.arg != name or _is_false(keyword.value):
                    continue
                on = isinstance(keyword.value, ast.Constant) and of_theirs
                edit = _without(keyword, text) if on else None
                if edit is None or any(one.first < edit.last and edit.first < one.last for one in edits):
                    lines.append(keyword.value.lineno)
                else:
                    edits.append(edit)
        elif isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
            lines.append(node.lineno)
        elif isinstance(node, ast.Constant) and node.value in (name, f"--{name}"):
            lines.append(node.lineno)  # of a dictionary, or of a command line
    return edits, sorted(lines)


def _lightning(tree: ast.Module, text: str) -> Advice | None:
    roots = ("lightning", "pytorch_lightning")
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in roots:
            names |= {alias.asname or alias.name for alias in node.names if alias.name == "Trainer"}
        elif isinstance(node, ast.Import):
            known = [alias for alias in node.names if alias.name.split(".")[0] in roots]
            names |= {f"{alias.asname or alias.name}.Trainer" for alias in known}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) in names]
    if not calls:
        return _lightning_cli(tree, text, roots)
    theirs = _their_finder(tree, text, roots)
    if theirs is not None:
        return theirs
    edits, notes = [], []
    for call in calls:
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        callbacks = given.get("callbacks")
        if None in given:
            notes.append(f"line {call.lineno}: add BatchSizeFinder() to the callbacks that ** hands over")
        elif callbacks is None:
            edits.append(Edit.argument(call, text, "callbacks=[BatchSizeFinder()]"))
        elif isinstance(callbacks, ast.List):
            more = "BatchSizeFinder(), " if callbacks.elts else "BatchSizeFinder()"
            edits.append(Edit.inside(callbacks.lineno, callbacks.col_offset + 1, text, more))
        else:
            notes.append(f"line {callbacks.lineno}: add BatchSizeFinder() to these callbacks")
    if edits:
        line = "from batchfit.integrations.lightning import BatchSizeFinder"
        edits += import_edits(tree, text, line, after=roots)
    return Advice("lightning", edited(text, edits), tuple(notes))


def _lightning_cli(tree: ast.Module, text: str, roots: Sequence[str]) -> Advice | None:
    """A program that makes its Trainer from a config or a command line."""
    if not set(roots) & _imported(tree):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _called(node).split(".")[-1] == "LightningCLI":
            note = (
                f"line {node.lineno}: its Trainer comes from LightningCLI: add "
                "batchfit.integrations.lightning.BatchSizeFinder to trainer.callbacks in its config, or pass "
                'trainer_defaults={"callbacks": [BatchSizeFinder()]}'
            )
            return Advice("lightning", text, (note,))
    return None


def _their_finder(tree: ast.Module, text: str, roots: Sequence[str]) -> Advice | None:
    """For a program that has Lightning's search already: ours in its place, since they refuse each other."""
    name = "BatchSizeFinder"
    edits = _imports_from_here(tree, text, roots, name, "lightning")
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith(name) for base in node.bases):
            why = f"it derives from Lightning's {name}; derive from batchfit's, and see that its hooks fit"
        elif isinstance(node, ast.Attribute) and node.attr == name:
            why = f"import {name} from batchfit.integrations.lightning in its place"
        elif isinstance(node, ast.Name) and node.id == name and not edits:
            why = f"it has a {name} of another kind; keep one, batchfit's"
        elif isinstance(node, ast.Call) and _called(node).endswith(".scale_batch_size"):
            why = f"take scale_batch_size out, and give the Trainer the callback {name} of batchfit's"
        else:
            continue
        return Advice("lightning", text, (f"line {node.lineno}: {why}",))
    return Advice("lightning", edited(text, edits)) if edits else None


def _loop(tree: ast.Module, text: str) -> Advice | None:
    found = loop_edits(tree, text)
    if found is None:
        return None
    edits = [*found.edits]
    if edits:
        edits += import_edits(tree, text, *found.imports, after=("torch", "accelerate"))
    return Advice("loop", edited(text, edits), found.notes)


# --- configs


def _advise_config(text: str, file: str) -> Advice:
    keys = {match[1]: match for match in re.finditer(r"^(\w+)[ \t]*:(.*)$", text, re.MULTILINE)}
    if "torchtune." not in text:
        return Advice("none", text, ("only torchtune's configs are known, and this is none",))
    other = _other_recipe(text, keys.keys())
    if other:
        ours = " or ".join(sorted(_TUNE_OURS))
        return Advice("none", text, (f"it is no config for torchtune's {ours}: {other}",))
    command = f"tune run batchfit.integrations.torchtune --config {file}"
    add = []
    if "recipe" not in keys:
        add.append(f"recipe: {'lora' if re.search(r'_component_:.*lora', text) else 'full'}")
    if "use_maximum_batch_size" not in keys and "batch_increase_function" not in keys:
        add.append("use_maximum_batch_size: True")
    end = keys["batch_size"].end()
    changed = text[:end] + "".join(f"\n{line}" for line in add) + text[end:]
    return Advice("torchtune", changed, (f"run it with: {command}",))


def _other_recipe(text: str, keys: Set[str]) -> str:
    """What shows that a config is for a recipe that we have not; empty where nothing does."""
    needed = {"batch_size", "checkpointer", "tokenizer", "dataset", "optimizer", "loss", "epochs", "model"}
    missing = sorted(needed - keys)
    if missing:
        return f"it has no {missing[0]}"
    foreign = sorted(key for key in keys if key == "quantizer" or key.endswith("_checkpointer"))
    if foreign:
        return f"it has a {foreign[0]}"
    if "torchtune.rlhf" in text:
        return "it uses torchtune.rlhf"
    comments = "\n".join(re.findall(r"^#.*$", text, re.MULTILINE))
    named = set(_TUNE_RUN.findall(comments)) or set(_TUNE_NAME.findall(comments))
    if "recipe" in keys or not named or named & {*_TUNE_OURS, "batchfit.integrations.torchtune"}:
        return ""
    return f"its comments name {min(named)}"


# --- imports and calls


def _imports_from_here(
    tree: ast.Module, text: str, roots: Sequence[str], name: str, module: str
) -> list[Edit]:
    """The imports of `name` from a framework, changed to those of our module of the framework's name."""
    edits = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in roots:
            continue
        ours = [alias for alias in node.names if alias.name == name]
        others = [alias for alias in node.names if alias.name != name]
        if ours and is_tidy(text, [node]):
            lines = [f"from batchfit.integrations.{module} import {_spelled(ours[0])}"]
            if others:
                lines.insert(0, f"from {node.module} import {', '.join(map(_spelled, others))}")
            edits.append(Edit.replacing(node, lines))
    return edits


def _without(keyword: ast.keyword, text: str) -> Edit | None:
    """A call without this argument; None where it runs over lines."""
    if keyword.end_lineno != keyword.lineno:
        return None
    number = keyword.lineno - 1
    line = text.split("\n")[number].encode()
    head, tail = line[: keyword.col_offset].decode(), line[keyword.end_col_offset :].decode()
    if not head.strip() and re.fullmatch(r"\s*,?\s*(#.*)?", tail):
        return Edit(number, number + 1, ())  # it has the line for itself
    comma = re.match(r"\s*,\s*", tail)
    if comma is None:
        return Edit(number, number + 1, (re.sub(r",\s*$", "", head) + tail,))
    tail = tail[comma.end() :]
    return Edit(number, number + 1, (head + tail if tail else head.rstrip(),))


def _spelled(alias: ast.alias) -> str:
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def _called(call: ast.Call) -> str:
    """`pl.Trainer` of `pl.Trainer(...)`."""
    return ast.unparse(call.func) if isinstance(call.func, ast.Name | ast.Attribute) else ""


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and not value.value


def _imported(tree: ast.Module) -> set[str]:
    """The packages that the program imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found
