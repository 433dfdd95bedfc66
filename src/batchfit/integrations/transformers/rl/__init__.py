"""TRL's trainers that generate (GRPO, RLOO) in `adapt`: `mixin.py` is what the trainer becomes."""
