"""A hub on the local disk for the suites of other repositories: tiny models, tokenizers and datasets.

    python benchmarks/trainer_suites_hub.py FOLDER --trl CHECKOUT

Rules
- Nothing is downloaded. A folder has the layout of the hub's own cache, so that `from_pretrained` finds it
  with HF_HOME=FOLDER and HF_HUB_OFFLINE=1, and nothing of transformers is patched.
- Models of TRL's tests come from the scripts in TRL's checkout that make them, run with stand-ins: a
  byte-level BPE tokenizer trained on the datasets' text (with TRL's own chat template of that family) instead
  of the real one, and a folder instead of the upload. So do its datasets.
- A script that asks for more than a tokenizer (an image processor, say) fails, and is named in `made.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

COMMIT = "0" * 40
_VOCABULARY = 1000
_SPECIAL = re.compile(r"<\|[^|<>]+\|>|<｜[^｜<>]+｜>|</?[A-Za-z_]+>|\[/?[A-Z_]+\]")
_PLAIN = (
    "{% for message in messages %}{{ '[' + message['role'] + '] ' + message['content'] + eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '[assistant] ' }}{% endif %}"
)
# How a model's name begins: TRL's chat template, and the tokens of begin, end and padding.
FAMILIES: dict[str, tuple[str | None, str | None, str, str | None]] = {
    "Qwen/Qwen2.5": ("qwen2_5", None, "<|im_end|>", "<|endoftext|>"),
    "Qwen/Qwen3-4B-Instruct-2507": ("qwen3_instruct_2507", None, "<|im_end|>", "<|endoftext|>"),
    "Qwen/Qwen3": ("qwen3", None, "<|im_end|>", "<|endoftext|>"),
    "meta-llama/Meta-Llama-3-8B": ("llama3", "<|begin_of_text|>", "<|eot_id|>", None),
    "meta-llama/Llama-3.1": ("llama3_1", "<|begin_of_text|>", "<|eot_id|>", None),
    "meta-llama/Llama-3.2": ("llama3_2", "<|begin_of_text|>", "<|eot_id|>", None),
    "openai/gpt-oss": ("gptoss", "<|startoftext|>", "<|return|>", "<|endoftext|>"),
    "google/gemma": ("gemma", "<bos>", "<eos>", "<pad>"),
    "CohereLabs/tiny-aya": ("cohere2", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<PAD>"),
    "CohereLabs": ("cohere", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<PAD>"),
    "microsoft/Phi-3.5": ("phi3_5", None, "<|endoftext|>", "<|endoftext|>"),
    "microsoft/Phi-3": ("phi3", None, "<|endoftext|>", "<|endoftext|>"),
    "deepseek-ai": (
        "deepseekv3",
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "zai-org/GLM": ("glm4moe", None, "<|endoftext|>", "<|endoftext|>"),
    "LiquidAI/LFM2.5": ("lfm2_2_5", "<|startoftext|>", "<|im_end|>", "<|pad|>"),
    "LiquidAI/LFM2": ("lfm2", "<|startoftext|>", "<|im_end|>", "<|pad|>"),
    "nvidia": ("nemotron_3_nano", "<s>", "<|im_end|>", "<|im_end|>"),
    "allenai": ("qwen2_5", None, "<|im_end|>", "<|endoftext|>"),
    "mistralai": (None, "<s>", "</s>", None),
    "EleutherAI": (None, None, "<|endoftext|>", None),
    "openai-community": (None, None, "<|endoftext|>", None),
    "": (None, None, "<|endoftext|>", "<|pad|>"),
}


def new_tokenizer(name: str, text: list[str]) -> Any:
    """A byte-level BPE tokenizer with the special tokens and the chat template of a model's family."""
    import trl
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    template, begin, end, padding = next(kept for prefix, kept in FAMILIES.items() if name.startswith(prefix))
    folder = Path(trl.__file__).parent / "chat_templates"
    chat = _PLAIN if template is None else (folder / f"{template}.jinja").read_text()
    special = dict.fromkeys([one for one in (end, padding, begin) if one] + _SPECIAL.findall(chat))
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[AddedToken(one, special=True) for one in special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(text, trainer)
    if begin is not None:
        token = (begin, made.token_to_id(begin))
        made.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[token]
        )
    tokens = {"bos_token": begin, "eos_token": end, "pad_token": padding}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32768, **tokens)
    fast.chat_template = chat
    return fast


def keep(hub: Path, name: str, *parts: Any) -> None:
    """Save what has `save_pretrained` under a name, as the hub's cache would hold it."""
    folder = hub / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for part in parts:
        if part is not None:
            part.save_pretrained(folder / "snapshots" / COMMIT)


def keep_dataset(hub: Path, name: str, config: str, split: str, dataset: Any) -> None:
    """Save a split of a dataset under a name."""
    folder = hub / "tables" / name.replace("/", "--") / config
    folder.mkdir(parents=True, exist_ok=True)
    dataset.to_parquet(folder / f"{split}.parquet")


def make_datasets(hub: Path, checkout: Path) -> list[str]:
    """Run TRL's scripts that make its datasets; returns all text in them."""
    import datasets

    made: dict[str, Any] = {}

    def upload(self: Any, repo_id: str, config_name: str, **more: Any) -> None:
        splits = self if isinstance(self, datasets.DatasetDict) else {"train": self}
        for split, dataset in splits.items():
            made[f"{repo_id} {config_name} {split}"] = dataset
            keep_dataset(hub, repo_id, config_name, split, dataset)

    datasets.Dataset.push_to_hub = datasets.DatasetDict.push_to_hub = upload
    for script in ("zen", "harmony", "toolcall"):
        main = runpy.run_path(str(checkout / "scripts" / f"generate_{script}_dataset.py"))["main"]
        main(0.1, True, f"trl-internal-testing/{script}")
    return [json.dumps(row, ensure_ascii=False) for dataset in made.values() for row in dataset]


@contextlib.contextmanager
def _instead(holder: Any, name: str, value: Any) -> Any:
    before = vars(holder)[name]
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


def make_models(hub: Path, checkout: Path, text: list[str]) -> dict[str, str]:
    """Run TRL's scripts that make its tiny models; returns those that could not run, with why."""
    import transformers

    sys.path.insert(0, str(checkout))
    common = importlib.import_module("scripts.generate_tiny_models._common")
    for check in ("check_transformers_version", "check_dtype_pattern", "print_config_diff"):
        setattr(common, check, lambda *given: None)
    organization = common.ORGANIZATION

    def upload(model: Any, tokenizer: Any, generation: Any, prefix: str = "", suffix: str = "") -> None:
        name = "-".join(filter(None, [prefix, type(model).__name__, suffix]))
        keep(hub, f"{organization}/{name}", model, tokenizer, generation)

    common.push_to_hub = upload
    tokenizers: dict[str, Any] = {}

    def tokenizer_of(name: str, **more: Any) -> Any:
        return tokenizers.setdefault(name, new_tokenizer(name, text))

    def generation_of(name: str, **more: Any) -> Any:
        its = tokenizer_of(name)
        ids = {"eos_token_id": its.eos_token_id, "pad_token_id": its.pad_token_id}
        return transformers.GenerationConfig(do_sample=True, **ids)

    def config_of(name: str, **sizes: Any) -> Any:
        known = [("Qwen/Qwen2", "Qwen2Config"), ("Qwen/Qwen3-30B", "Qwen3MoeConfig")]
        known += [("Qwen/Qwen3", "Qwen3Config"), ("meta-llama", "LlamaConfig"), ("Eleuther", "GPTNeoXConfig")]
        kind = next(kind for prefix, kind in known if name.startswith(prefix))
        its = tokenizer_of(name)
        ids = {"eos_token_id": its.eos_token_id, "bos_token_id": its.bos_token_id}
        vocabulary = {"vocab_size": len(its), "pad_token_id": its.pad_token_id}
        return getattr(transformers, kind)(**ids, **vocabulary, **sizes)

    failed: dict[str, str] = {}
    folders = ("for_causal_lm", "for_sequence_classification")
    scripts = [
        one for folder in folders for one in (checkout / "scripts/generate_tiny_models" / folder).glob("*.py")
    ]
    with contextlib.ExitStack() as stack:
        for kind, instead in (
            (transformers.AutoTokenizer, tokenizer_of),
            (transformers.GenerationConfig, generation_of),
            (transformers.AutoConfig, config_of),
        ):
            stack.enter_context(_instead_method(kind, instead))
        for script in sorted(scripts):
            if script.stem.startswith(("_", "peft")):
                continue
            module = f"scripts.generate_tiny_models.{script.parent.name}.{script.stem}"
            try:
                runpy.run_module(module, run_name="made")
            except Exception as error:  # noqa: BLE001 - another repository's script: named, with why
                failed[script.stem] = f"{type(error).__name__}: {error}"[:200]
    return failed


def _instead_method(kind: Any, function: Callable[..., Any]) -> Any:
    own = vars(kind).get("from_pretrained")
    if own is None:
        raise TypeError(f"{kind.__name__} has no from_pretrained of its own")
    return _instead(kind, "from_pretrained", staticmethod(function))


def make_others(hub: Path, text: list[str]) -> None:
    """Models and datasets of the suites of transformers and sentence-transformers."""
    import datasets
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
    its = new_tokenizer("", text)
    llama = transformers.LlamaConfig(vocab_size=len(its), num_key_value_heads=2, **sizes)
    keep(hub, "hf-internal-testing/tiny-random-LlamaForCausalLM", transformers.LlamaForCausalLM(llama), its)
    gpt2 = transformers.GPT2Config(vocab_size=len(its), n_embd=16, n_head=2, n_layer=2)
    keep(
        hub,
        "openai-community/gpt2",
        transformers.GPT2LMHeadModel(gpt2),
        new_tokenizer("openai-community", text),
    )
    lines = [line for one in text for line in re.split(r"(?<=[.!?]) ", one) if len(line) > 20]
    for name, config, column in (
        ("Salesforce/wikitext", "wikitext-2-raw-v1", {"text": lines}),
        ("fka/awesome-chatgpt-prompts", "default", {"act": lines, "prompt": lines}),
        ("abisee/cnn_dailymail", "3.0.0", {"article": lines, "highlights": lines[::-1], "id": lines}),
        ("openai/gsm8k", "main", {"question": lines, "answer": lines[::-1]}),
        ("stanfordnlp/imdb", "default", {"text": lines, "label": [len(line) % 2 for line in lines]}),
    ):
        for split in ("train", "test", "validation"):
            keep_dataset(hub, name, config, split, datasets.Dataset.from_dict(column))


def make_sentences(hub: Path, text: list[str]) -> None:
    """The model and the data of the tests of sentence-transformers: a tiny BERT, pairs with a score."""
    import datasets
    import tokenizers
    import transformers
    from sentence_transformers import SentenceTransformer, models

    words = tokenizers.BertWordPieceTokenizer()
    words.train_from_iterator(text, vocab_size=_VOCABULARY, show_progress=False)
    special = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    its = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words._tokenizer, pad_token="[PAD]", unk_token="[UNK]", **special
    )
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 512}
    config = transformers.BertConfig(vocab_size=len(its), **sizes)
    name = "sentence-transformers-testing/stsb-bert-tiny"
    keep(hub, f"{name}-base", transformers.BertModel(config), its)
    base = hub / "hub" / f"models--{name.replace('/', '--')}-base" / "snapshots" / COMMIT
    encoder = models.Transformer(str(base))
    model = SentenceTransformer(modules=[encoder, models.Pooling(sizes["hidden_size"])], device="cpu")
    keep(hub, f"{name}-safetensors", model)
    lines = [line for one in text for line in re.split(r"(?<=[.!?]) ", one) if len(line) > 20]
    for split, count in (("train", 1000), ("validation", 200), ("test", 200)):
        pairs = [(lines[n % len(lines)], lines[(7 * n + 3) % len(lines)]) for n in range(count)]
        rows = {"sentence1": [a for a, _ in pairs], "sentence2": [b for _, b in pairs]}
        scores = {"score": [(n % 11) / 10 for n in range(count)]}
        keep_dataset(
            hub, "sentence-transformers/stsb", "default", split, datasets.Dataset.from_dict(rows | scores)
        )


def serve(hub: Path) -> None:
    """Let `datasets.load_dataset` read the hub's own tables by their names."""
    import datasets

    plain = datasets.load_dataset

    def load(path: Any, name: Any = None, *given: Any, split: Any = None, **named: Any) -> Any:
        folder = hub / "tables" / str(path).replace("/", "--") / (name or "default")
        if not folder.is_dir():
            return plain(path, name, *given, split=split, **named)
        files = {one.stem: str(one) for one in sorted(folder.glob("*.parquet"))}
        kept = {key: named[key] for key in ("streaming",) if key in named}
        return plain("parquet", data_files=files, split=split, **kept)

    datasets.load_dataset = load


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("hub", type=Path)
    parser.add_argument("--trl", type=Path, required=True, help="a checkout of TRL")
    given = parser.parse_args()
    text = make_datasets(given.hub, given.trl)
    make_others(given.hub, text)
    make_sentences(given.hub, text)
    failed = make_models(given.hub, given.trl, text)
    (given.hub / "made.json").write_text(json.dumps(failed, indent=1))
    print(json.dumps(failed, indent=1))


if __name__ == "__main__":
    main()
