"""Public models by name: the shape of each, as its configuration states it.

Rules: facts only, those of the published configuration; no weights are needed. The number of parameters is
the published one, and a test builds each model and counts. A name is found however it is written: with or
without its owner, in any case, `Qwen/Qwen3-8B` or `qwen3-8b`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal, final

from batchfit.errors import TargetError

Task = Literal["causal", "masked", "image", "seq2seq", "speech", "diffusion"]
_SUFFIX = re.compile(r"-(instruct|chat|it|base|hf|v0\.\d|\d{4})(?=-|$)")


@final
@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model: its name, what it is trained to do, and the fields of its configuration.

    `config` has `model_type` and what differs from that type's defaults. `parameters` is the published
    number, 0 where the model came from a file. `length` is what one sample holds unless it is asked for
    otherwise: tokens, or the side of an image.
    """

    name: str
    task: Task
    config: Mapping[str, Any]
    parameters: int = 0
    length: int = 2048
    also: tuple[str, ...] = field(default=())

    @property
    def short_name(self) -> str:
        """Without the owner."""
        return self.name.rpartition("/")[2]


def _decoder(
    name: str,
    kind: str,
    sizes: tuple[int, int, int, int, int],
    vocabulary: int,
    parameters: int,
    *also: str,
    **more: Any,
) -> ModelShape:
    """`sizes`: hidden size, size of the feed-forward layer, layers, heads, heads of keys and values."""
    hidden, inner, layers, heads, kv_heads = sizes
    config = {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,
        **more,
    }
    return ModelShape(name, "causal", config, parameters, also=also)


def _gpt2(name: str, width: int, layers: int, heads: int, parameters: int) -> ModelShape:
    config = {"model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads}
    return ModelShape(f"openai-community/{name}", "causal", config, parameters, length=1024)


def _bert(name: str, kind: str, sizes: tuple[int, int, int, int], parameters: int, **more: Any) -> ModelShape:
    hidden, inner, layers, heads = sizes
    config = {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **more,
    }
    return ModelShape(name, "masked", config, parameters, length=512)


def _vit(name: str, sizes: tuple[int, int, int, int], parameters: int, patch: int = 16) -> ModelShape:
    hidden, inner, layers, heads = sizes
    config = {
        "model_type": "vit",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "patch_size": patch,
        "num_labels": 1000,
    }
    return ModelShape(f"google/{name}", "image", config, parameters, length=224)


def _resnet(name: str, depths: tuple[int, ...], parameters: int) -> ModelShape:
    config = {"model_type": "resnet", "depths": list(depths), "num_labels": 1000}
    return ModelShape(f"microsoft/{name}", "image", config, parameters, length=224)


def _t5(name: str, sizes: tuple[int, int, int, int], parameters: int) -> ModelShape:
    width, inner, layers, heads = sizes
    config = {
        "model_type": "t5",
        "d_model": width,
        "d_ff": inner,
        "num_layers": layers,
        "num_heads": heads,
        "decoder_start_token_id": 0,
    }
    return ModelShape(name, "seq2seq", config, parameters, length=512)


def _whisper(name: str, width: int, layers: int, parameters: int, mels: int = 80) -> ModelShape:
    config = {
        "model_type": "whisper",
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": width // 64,
        "decoder_attention_heads": width // 64,
        "encoder_ffn_dim": 4 * width,
        "decoder_ffn_dim": 4 * width,
        "num_mel_bins": mels,
        "vocab_size": 51866 if mels == 128 else 51865,
    }
    return ModelShape(f"openai/{name}", "speech", config, parameters, length=448)


_LLAMA3 = {"rope_theta": 500000.0}
_QWEN2 = {"tie_word_embeddings": True}
_QWEN3 = {"head_dim": 128}
_GEMMA2 = {"tie_word_embeddings": True, "head_dim": 256}
SHAPES: tuple[ModelShape, ...] = (
    _decoder(
        "meta-llama/Llama-3.1-8B",
        "llama",
        (4096, 14336, 32, 32, 8),
        128256,
        8_030_261_248,
        "llama-3-8b",
        "deepseek-r1-distill-llama-8b",
        **_LLAMA3,
    ),
    _decoder(
        "meta-llama/Llama-3.1-70B",
        "llama",
        (8192, 28672, 80, 64, 8),
        128256,
        70_553_706_496,
        "llama-3-70b",
        "llama-3.3-70b",
        **_LLAMA3,
    ),
    _decoder(
        "meta-llama/Llama-3.2-1B",
        "llama",
        (2048, 8192, 16, 32, 8),
        128256,
        1_235_814_400,
        tie_word_embeddings=True,
        head_dim=64,
        **_LLAMA3,
    ),
    _decoder(
        "meta-llama/Llama-3.2-3B",
        "llama",
        (3072, 8192, 28, 24, 8),
        128256,
        3_212_749_824,
        tie_word_embeddings=True,
        head_dim=128,
        **_LLAMA3,
    ),
    _decoder("meta-llama/Llama-2-7b", "llama", (4096, 11008, 32, 32, 32), 32000, 6_738_415_616),
    _decoder("meta-llama/Llama-2-13b", "llama", (5120, 13824, 40, 40, 40), 32000, 13_015_864_320),
    _decoder("meta-llama/Llama-2-70b", "llama", (8192, 28672, 80, 64, 8), 32000, 68_976_648_192),
    _decoder(
        "TinyLlama/TinyLlama-1.1B",
        "llama",
        (2048, 5632, 22, 32, 4),
        32000,
        1_100_048_384,
        "tinyllama-1.1b-chat-v1.0",
    ),
    _decoder("mistralai/Mistral-7B-v0.1", "mistral", (4096, 14336, 32, 32, 8), 32000, 7_241_732_096),
    _decoder("mistralai/Mistral-7B-v0.3", "mistral", (4096, 14336, 32, 32, 8), 32768, 7_248_023_552),
    _decoder(
        "mistralai/Mistral-Nemo-12B",
        "mistral",
        (5120, 14336, 40, 32, 8),
        131072,
        12_247_782_400,
        "mistral-nemo-base-2407",
        "mistral-nemo-instruct-2407",
        head_dim=128,
    ),
    _decoder(
        "mistralai/Mistral-Small-24B",
        "mistral",
        (5120, 32768, 40, 32, 8),
        131072,
        23_572_403_200,
        "mistral-small-24b-base-2501",
        head_dim=128,
    ),
    _decoder("Qwen/Qwen2.5-0.5B", "qwen2", (896, 4864, 24, 14, 2), 151936, 494_032_768, **_QWEN2),
    _decoder("Qwen/Qwen2.5-1.5B", "qwen2", (1536, 8960, 28, 12, 2), 151936, 1_543_714_304, **_QWEN2),
    _decoder("Qwen/Qwen2.5-3B", "qwen2", (2048, 11008, 36, 16, 2), 151936, 3_085_938_688, **_QWEN2),
    _decoder(
        "Qwen/Qwen2.5-7B",
        "qwen2",
        (3584, 18944, 28, 28, 4),
        152064,
        7_615_616_512,
        "deepseek-r1-distill-qwen-7b",
    ),
    _decoder(
        "Qwen/Qwen2.5-14B",
        "qwen2",
        (5120, 13824, 48, 40, 8),
        152064,
        14_770_033_664,
        "deepseek-r1-distill-qwen-14b",
    ),
    _decoder(
        "Qwen/Qwen2.5-32B",
        "qwen2",
        (5120, 27648, 64, 40, 8),
        152064,
        32_763_876_352,
        "qwq-32b",
        "deepseek-r1-distill-qwen-32b",
    ),
    _decoder("Qwen/Qwen2.5-72B", "qwen2", (8192, 29568, 80, 64, 8), 152064, 72_706_203_648),
    _decoder(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "qwen2",
        (1536, 8960, 28, 12, 2),
        151936,
        1_777_088_000,
        tie_word_embeddings=False,
    ),
    _decoder("deepseek-ai/deepseek-llm-7b", "llama", (4096, 11008, 30, 32, 32), 102400, 6_910_365_696),
    _decoder("deepseek-ai/deepseek-coder-1.3b", "llama", (2048, 5504, 24, 16, 16), 32256, 1_346_471_936),
    _decoder(
        "Qwen/Qwen3-0.6B",
        "qwen3",
        (1024, 3072, 28, 16, 8),
        151936,
        596_049_920,
        tie_word_embeddings=True,
        **_QWEN3,
    ),
    _decoder(
        "Qwen/Qwen3-1.7B",
        "qwen3",
        (2048, 6144, 28, 16, 8),
        151936,
        1_720_574_976,
        tie_word_embeddings=True,
        **_QWEN3,
    ),
    _decoder(
        "Qwen/Qwen3-4B",
        "qwen3",
        (2560, 9728, 36, 32, 8),
        151936,
        4_022_468_096,
        tie_word_embeddings=True,
        **_QWEN3,
    ),
    _decoder("Qwen/Qwen3-8B", "qwen3", (4096, 12288, 36, 32, 8), 151936, 8_190_735_360, **_QWEN3),
    _decoder("Qwen/Qwen3-14B", "qwen3", (5120, 17408, 40, 40, 8), 151936, 14_768_307_200, **_QWEN3),
    _decoder("Qwen/Qwen3-32B", "qwen3", (5120, 25600, 64, 64, 8), 151936, 32_762_123_264, **_QWEN3),
    _decoder("google/gemma-2-2b", "gemma2", (2304, 9216, 26, 8, 4), 256000, 2_614_341_888, **_GEMMA2),
    _decoder("google/gemma-2-9b", "gemma2", (3584, 14336, 42, 16, 8), 256000, 9_241_705_984, **_GEMMA2),
    _decoder(
        "google/gemma-2-27b",
        "gemma2",
        (4608, 36864, 46, 32, 16),
        256000,
        27_227_128_320,
        tie_word_embeddings=True,
        head_dim=128,
        query_pre_attn_scalar=144,
    ),
    _decoder(
        "google/gemma-3-1b",
        "gemma3_text",
        (1152, 6912, 26, 4, 1),
        262144,
        999_885_952,
        "gemma-3-1b-pt",
        head_dim=256,
        tie_word_embeddings=True,
    ),
    _decoder(
        "microsoft/Phi-3-mini",
        "phi3",
        (3072, 8192, 32, 32, 32),
        32064,
        3_821_079_552,
        "phi-3-mini-4k-instruct",
        "phi-3.5-mini",
        pad_token_id=None,
    ),
    _decoder("microsoft/phi-4", "phi3", (5120, 17920, 40, 40, 10), 100352, 14_659_507_200, pad_token_id=None),
    _decoder(
        "HuggingFaceTB/SmolLM2-135M",
        "llama",
        (576, 1536, 30, 9, 3),
        49152,
        134_515_008,
        tie_word_embeddings=True,
    ),
    _decoder(
        "HuggingFaceTB/SmolLM2-360M",
        "llama",
        (960, 2560, 32, 15, 5),
        49152,
        361_821_120,
        tie_word_embeddings=True,
    ),
    _decoder(
        "HuggingFaceTB/SmolLM2-1.7B",
        "llama",
        (2048, 8192, 24, 32, 32),
        49152,
        1_711_376_384,
        tie_word_embeddings=True,
    ),
    _gpt2("gpt2", 768, 12, 12, 124_439_808),
    _gpt2("gpt2-medium", 1024, 24, 16, 354_823_168),
    _gpt2("gpt2-large", 1280, 36, 20, 774_030_080),
    _gpt2("gpt2-xl", 1600, 48, 25, 1_557_611_200),
    _bert("google-bert/bert-base-uncased", "bert", (768, 3072, 12, 12), 109_514_298),
    _bert("google-bert/bert-large-uncased", "bert", (1024, 4096, 24, 16), 335_174_458),
    _bert(
        "FacebookAI/roberta-base",
        "roberta",
        (768, 3072, 12, 12),
        124_697_433,
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
    ),
    _bert(
        "FacebookAI/roberta-large",
        "roberta",
        (1024, 4096, 24, 16),
        355_412_057,
        vocab_size=50265,
        max_position_embeddings=514,
        type_vocab_size=1,
    ),
    _t5("google-t5/t5-small", (512, 2048, 6, 8), 60_506_624),
    _t5("google-t5/t5-base", (768, 3072, 12, 12), 222_903_552),
    _t5("google-t5/t5-large", (1024, 4096, 24, 16), 737_668_096),
    _whisper("whisper-tiny", 384, 4, 37_760_640),
    _whisper("whisper-small", 768, 12, 241_734_912),
    _whisper("whisper-medium", 1024, 24, 763_857_920),
    _whisper("whisper-large-v3", 1280, 32, 1_543_490_560, mels=128),
    _vit("vit-base-patch16-224", (768, 3072, 12, 12), 86_567_656),
    _vit("vit-large-patch16-224", (1024, 4096, 24, 16), 304_326_632),
    _vit("vit-huge-patch14-224", (1280, 5120, 32, 16), 632_045_800, patch=14),
    _resnet("resnet-50", (3, 4, 6, 3), 25_557_032),
    _resnet("resnet-101", (3, 4, 23, 3), 44_549_160),
    _resnet("resnet-152", (3, 8, 36, 3), 60_192_808),
)


def shape_named(text: str) -> ModelShape:
    """The model of that name; of one that is not known, the names that are close."""
    names = dict(_names())
    key = _plain(text)
    found = names.get(key) or names.get(_SUFFIX.sub("", key))
    if found is not None:
        return found
    close = list(dict.fromkeys(names[one].name for one in get_close_matches(key, names, n=6, cutoff=0.5)))[:4]
    near = f" Close names: {', '.join(close)}." if close else ""
    raise TargetError(
        f"{text!r} is none of the {len(SHAPES)} models that batchfit knows without a download.{near} Give "
        "the path of its config.json instead, or a workload (file.py:name); `batchfit plan --list-models` "
        "lists all names"
    )


def model_lines() -> list[str]:
    """The known models, a line each."""
    wide = max(len(one.name) for one in SHAPES)
    return [f"{one.name:<{wide}}  {format_parameters(one.parameters):>6}" for one in SHAPES]


def format_parameters(count: int) -> str:
    """As people say it: 124M, 8.0B."""
    return f"{count / 1e9:.1f}B" if count >= 999_500_000 else f"{count / 1e6:.0f}M"


def _names() -> Iterator[tuple[str, ModelShape]]:
    for shape in SHAPES:
        for name in (shape.name, *shape.also):
            yield _plain(name), shape
            yield _SUFFIX.sub("", _plain(name)), shape


def _plain(name: str) -> str:
    return name.strip().rpartition("/")[2].lower().replace("_", "-")
