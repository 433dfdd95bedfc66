"""Which batch size can a vision-language model answer questions with, for each number of image crops?

    batchfit sweep examples/sweep_crops.yaml --output crops.json
    python examples/sweep_crops.py

An image is cut into up to `max_crops` crops, each becomes 16 tokens in front of the question, and the answer
is generated: the cache of keys and values grows with crops, question and answer, so a forward pass alone
would promise too much. The model is tiny and has random weights; put your own in its place.

It needs transformers, and the YAML file pyyaml: pip install "batchfit[transformers,yaml]".
"""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import batchfit

SAMPLES, CROP, QUESTION, ANSWER, VOCABULARY = 64, 16, 8, 4, 64


class Questions(Dataset[dict[str, torch.Tensor]]):
    """Images as crops, with a question and the first word of its answer; made up, always the same."""

    def __init__(self, max_crops: int) -> None:
        self.max_crops = max_crops

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "crops": torch.rand(self.max_crops, 3, CROP, CROP, generator=generator),
            "question": torch.randint(1, VOCABULARY, (QUESTION,), generator=generator),
            "answer": torch.randint(1, VOCABULARY, (), generator=generator),
        }


class VisionLanguage(nn.Module):
    """Crops become tokens, and a small Llama goes on from them and the question."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.vision = nn.Conv2d(3, width, kernel_size=4, stride=4)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=512,
            pad_token_id=0,
        )
        self.language = LlamaForCausalLM(config)

    def generate(self, crops: torch.Tensor, question: torch.Tensor, **options: Any) -> torch.Tensor:
        """The new tokens of the answers."""
        seen = self.vision(crops.flatten(0, 1)).flatten(2).transpose(1, 2)
        seen = seen.reshape(crops.shape[0], -1, seen.shape[-1])
        asked = self.language.get_input_embeddings()(question)
        prompt = torch.cat([seen, asked], dim=1)
        mask = torch.ones(prompt.shape[:2], dtype=torch.long, device=prompt.device)
        return self.language.generate(inputs_embeds=prompt, attention_mask=mask, **options)


def make(max_crops: int) -> batchfit.Workload:
    """The workload of one configuration; its loader is built inside the trial, as an evaluation does it."""
    torch.manual_seed(0)
    model = VisionLanguage().eval().to("cuda" if torch.cuda.is_available() else "cpu")

    def first_batch(size: int) -> dict[str, torch.Tensor]:
        batch = next(iter(DataLoader(Questions(max_crops), batch_size=size)))
        if len(batch["answer"]) < size:
            raise ValueError(f"there are only {SAMPLES} samples, and a batch of {size} was asked for")
        return {"crops": batch["crops"], "question": batch["question"]}

    return batchfit.generation(model, first_batch, max_new_tokens=ANSWER)


@torch.inference_mode()
def accuracy(workload: batchfit.Workload, size: int, max_crops: int) -> dict[str, Any]:
    """How many first words are right, over the whole dataset, at the size that was found."""
    model, right = workload.model, 0
    device = next(model.parameters()).device
    for batch in DataLoader(Questions(max_crops), batch_size=size):
        crops, question = batch["crops"].to(device), batch["question"].to(device)
        words = model.generate(crops, question, max_new_tokens=ANSWER, do_sample=False)
        right += int((words[:, 0].cpu() == batch["answer"]).sum())
    return {"accuracy": right / SAMPLES, "samples": SAMPLES}


if __name__ == "__main__":
    budget = None if torch.cuda.is_available() else "6MiB"
    knobs = {"max_crops": [2, 8, 12]}
    print(batchfit.sweep(make, knobs, batch_size=64, measure=accuracy, budget=budget, soak_steps=3))
