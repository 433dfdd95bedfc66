"""Models under FSDP2 (`fully_shard`), as `fsdp` uses them: inspected, resharded, reset, or refused.

Rules
- Refused, with the reason: collectives beside those of FSDP2, and gradients that would not be reduced
  or could not be undone.
- A resharded model has all its parameters sharded and remembers no forward: every microbatch that begins so
  has the same collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchfit._engine.distributed import fsdp_reset
from batchfit._engine.distributed.ranks import Ranks
from batchfit._engine.torch_private import fsdp2, needs
from batchfit.errors import BatchfitError, SnapshotError


@final
class Shards:
    """All models of a Microbatcher that are under FSDP2."""

    def __init__(self, modules: Sequence[nn.Module], ranks: Ranks) -> None:
        self._modules = fsdp_reset.sharded_modules(modules)
        self._ranks = ranks
        if any(isinstance(module, DistributedDataParallel) for module in modules):
            raise BatchfitError("models must be under DDP or under FSDP2, not some under each")
        self._meshes = self._checked_meshes()
        self.factor()  # refuses what differs from module to module

    def _groups(self) -> list[Any]:
        return [group for module in self._modules for group in fsdp2.groups(module)]

    def factor(self) -> float:
        """What FSDP2 divides the sum of the ranks' gradients by."""
        asked = {fsdp2.divide_factor(group) for group in self._groups()}
        if len(asked) > 1:
            raise BatchfitError(
                "set_gradient_divide_factor() must be the same for all parts of the models, not "
                f"{sorted(map(str, asked))}: Microbatcher scales losses for all of them alike"
            )
        return float(next(iter(asked), None) or self._ranks.world_size)

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Refuse leaves whose gradients would not be reduced."""
        known = {id(fsdp2.sharded(one)) for group in self._groups() for one in fsdp2.parameters(group)}
        outside = [leaf for leaf in leaves if id(leaf) not in known]
        if outside:
            shown = ", ".join(str(tuple(leaf.shape)) for leaf in outside[:3])
            raise BatchfitError(
                f"{len(outside)} of the parameters that get gradients are not under FSDP2 (shapes {shown}): "
                "they would become different on each rank. Call fully_shard on their module, or freeze them"
            )

    def check_reached(self, modules: Iterable[nn.Module]) -> None:
        """Refuse a model with collectives that Microbatcher was not given."""
        ours = {id(one) for one in self._modules}
        for module in modules:
            inner = [*fsdp_reset.sharded_modules(module.modules())]
            if isinstance(module, DistributedDataParallel) or any(id(one) not in ours for one in inner):
                raise BatchfitError(
                    "fn runs a model under FSDP2 or DDP that Microbatcher was not given: it has "
                    "collectives, and could not be reset after an OOM. Pass it too"
                )

    def gathered_parameters(self) -> list[torch.Tensor]:
        """The gathered parameters that stand for the sharded ones in a graph, as far as they exist."""
        found = [fsdp2.gathered(one) for group in self._groups() for one in fsdp2.parameters(group)]
        return [one for one in found if one is not None]

    def reshard(self) -> None:
        """Shard all parameters, and forget forwards: then each microbatch has the same collectives.

        A forward without a backward (evaluation) leaves the root's parameters gathered, and an entry in the
        order by which FSDP2 gathers ahead in the next backward: one collective more there.
        """
        for module in self._modules:
            module.reshard()
            fsdp2.forget_forwards(module)

    def check_flags(self) -> None:
        """Refuse gradients that FSDP2 would keep unsharded, where they cannot be undone."""
        if not all(map(fsdp2.reduces, self._groups())):
            raise BatchfitError(
                "set_requires_gradient_sync(False) keeps gradients unsharded inside FSDP2, where "
                "they cannot be undone after an OOM. Leave it True: backward calls add up"
            )

    def reset(self) -> bool:
        """After a step that failed in them; False where this torch cannot do it."""
        try:
            for module in self._modules:
                fsdp_reset.reset(module)
        except SnapshotError:
            with suppress(Exception):  # as far as it goes: memory for what is still to be sent
                self.reshard()
            return False
        return True

    def can_retry(self) -> str:
        """Why a batch cannot be retried here; "" where it can. All ranks call it together."""
        tests = [fsdp_reset.self_test(mesh, ranks=self._ranks) for mesh in self._meshes]
        return next((test.why for test in tests if not test.passed), "")

    def _checked_meshes(self) -> list[Any]:
        found: dict[int, Any] = {}
        for one in (one for group in self._groups() for one in fsdp2.parameters(group)):
            if fsdp2.is_spread(one):
                raise BatchfitError(
                    "parameters are spread over ranks by tensor parallelism too, which has "
                    "collectives in forward, with sizes of the batch. Shard with FSDP2 alone"
                )
            mesh = fsdp2.sharded(one).device_mesh
            found.setdefault(id(mesh), mesh)
        for mesh in found.values():
            if mesh.device_type == "cpu" and not fsdp2.runs_on_cpu():
                raise needs.FSDP2_ON_CPU.refusal()
            if mesh.size() != self._ranks.world_size:
                raise BatchfitError(
                    f"a model is sharded over {mesh.size()} of {self._ranks.world_size} ranks, and all ranks "
                    "must agree on a batch. Shard it over all of them"
                )
        return list(found.values())
