"""An MLP with a Hydra config: python train.py train.batch_size=64"""

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn


def build(cfg):
    layers = [nn.Linear(64, cfg.model.width)]
    for _ in range(cfg.model.depth):
        layers += [nn.SiLU(), nn.Linear(cfg.model.width, cfg.model.width)]
    return nn.Sequential(*layers, nn.Linear(cfg.model.width, 1))


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    print(OmegaConf.to_yaml(cfg))
    torch.manual_seed(cfg.seed)
    model = build(cfg)
    optimizer = torch.optim.Adam(model.parameters(), cfg.train.lr)
    for step in range(cfg.train.steps):
        x = torch.randn(cfg.train.batch_size, 64)
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(step, loss.item())
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
