"""Train a causal language model with the Hugging Face Trainer, after its example script run_clm.py."""

import logging
import sys
from dataclasses import dataclass, field

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed

logger = logging.getLogger(__name__)


@dataclass
class ModelArguments:
    hidden_size: int = field(default=64, metadata={"help": "width of the model that is trained from scratch"})
    num_layers: int = field(default=2)


@dataclass
class DataTrainingArguments:
    train_file: str = field(default="train.txt", metadata={"help": "the training data, a text file"})
    block_size: int = field(default=64)


class Blocks(Dataset):
    """The bytes of a text in blocks of one length."""

    def __init__(self, path, block_size):
        with open(path, "rb") as stream:
            self.data = stream.read()
        self.block_size = block_size

    def __len__(self):
        return len(self.data) // self.block_size

    def __getitem__(self, index):
        ids = list(self.data[index * self.block_size : (index + 1) * self.block_size])
        return {"input_ids": ids, "labels": ids}


def collate(features):
    return {name: torch.tensor([one[name] for one in features]) for name in features[0]}


def main():
    parser = HfArgumentParser((ModelArguments, DataTrainingArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=logging.INFO)
    logger.info("Training/evaluation parameters %s", training_args)
    set_seed(training_args.seed)
    config = GPT2Config(
        vocab_size=256,
        n_positions=data_args.block_size,
        n_embd=model_args.hidden_size,
        n_layer=model_args.num_layers,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Blocks(data_args.train_file, data_args.block_size),
        data_collator=collate,
    )
    if training_args.do_train:
        result = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_state()
    if training_args.push_to_hub:
        trainer.push_to_hub()


if __name__ == "__main__":
    main()
