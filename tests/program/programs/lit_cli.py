"""The autoencoder of lit.py with LightningCLI: python lit_cli.py fit --data.batch_size 64"""

from lightning.pytorch.cli import LightningCLI

from lit import DigitsModule, LitAutoEncoder


def main():
    LightningCLI(
        LitAutoEncoder,
        DigitsModule,
        seed_everything_default=0,
        trainer_defaults={"max_epochs": 50, "accelerator": "cpu", "log_every_n_steps": 1},
    )


if __name__ == "__main__":
    main()
