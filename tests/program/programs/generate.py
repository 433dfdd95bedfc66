"""Completions for a file of prompts: python generate.py --batch_size 8"""

import argparse
import json

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def load_model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=128, n_embd=64, n_layer=2, n_head=2, bos_token_id=None, eos_token_id=None
    )
    return GPT2LMHeadModel(config).eval()


def prompts(count, length=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, length), generator=generator)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--num_prompts", type=int, default=3000)
    args = parser.parse_args()
    model = load_model()
    results = []
    for start in range(0, args.num_prompts, args.batch_size):
        count = min(args.batch_size, args.num_prompts - start)
        with torch.no_grad():
            outputs = model.generate(
                prompts(count), max_new_tokens=args.max_new_tokens, do_sample=False, pad_token_id=0
            )
        results += outputs.tolist()
        print(f"{len(results)} of {args.num_prompts}")
    with open("completions.json", "w") as stream:
        json.dump(results, stream)


if __name__ == "__main__":
    main()
