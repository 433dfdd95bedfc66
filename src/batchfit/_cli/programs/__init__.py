"""Commands on a program: what stands after `--`, as in `batchfit find -- python train.py --batch-size {}`."""
