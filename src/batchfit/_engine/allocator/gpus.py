"""The GPUs that a prediction can be made for: usable bytes, and what changes memory there.

A new GPU is a row of `GPUS` here, one of `PEAKS` in `_plan/pure/speed.py` (without it `plan` says no
speed), and one in `_profile/pure/peak_flops.py` (without it `profile` says no share of the peak).

Rules: `usable_bytes` is what a program's tensors can have once the driver and the CUDA context have taken
theirs: the total that CUDA reports, less what a context took on the GPU that we measured. The total is
- "measured": by us;
- "reported": the smallest in public reports of what torch prints on Linux ("a total capacity of ...");
- "nominal": the vendor's figure, less a share that no reported GPU of its kind passes: 4 % (2080 Ti: 10.57 of
  11 GiB), 9 % where GDDR memory spends a sixteenth on ECC (T4: 14.56 of 16), 2 % of HBM (A30: 23.53 of 24),
  9 % where the vendor may count a billion bytes as one GB (B200: 178.4 of 192).
GeForce and RTX workstation GPUs are counted with ECC off, their default. On Windows CUDA reports more, and
the desktop takes some. AMD's GPUs are not listed: their allocator is torch's, but what HIP rounds to and what
its kernels work with was not looked at.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Literal, final

GIB = 2**30
MIB = 2**20
_SHOWN = 8  # names that are like one that is not known
_CONTEXT = 560 * MIB  # an H200 after the first kernel, torch 2.11
Memory = Literal["gddr", "ecc", "hbm", "decimal"]
Source = Literal["measured", "reported", "nominal", "given"]  # of the memory
_LOST = {"gddr": 0.04, "ecc": 0.09, "hbm": 0.02, "decimal": 0.09}
_NO_LONGER_BUILT = (7, 5)  # CUDA 13's compilers make no kernels for what is older


@final
@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    usable_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    threads_per_multiprocessor: int = 2048
    measured: bool = False
    source: Source = "reported"
    box_gb: int = 0  # the memory that the vendor names
    note: str = field(default="", compare=False)  # which variant was taken, where the name left it open

    @property
    def blas_bytes(self) -> int:
        """What cuBLAS keeps for each thread that uses it (at::cuda::getChosenWorkspaceSize)."""
        return 32 * MIB if self.capability >= (9, 0) else 8 * MIB + 128 * 1024

    @property
    def blas_lt_bytes(self) -> int:
        """What cuBLASLt keeps beside it."""
        return MIB

    @property
    def prefers_cudnn_attention(self) -> bool:
        """torch puts cuDNN's attention first on Hopper and on B200s, not on RTX GPUs."""
        return self.capability[0] in (9, 10)

    @property
    def caveats(self) -> tuple[str, ...]:
        """What a prediction for it should say."""
        found = [self.note] if self.note else []
        if not self.measured:
            of = {"reported": "what CUDA reports there", "given": "what was given"}
            memory = of.get(self.source, f"derived from {self.box_gb} GB nominal")
            found.append(f"{self.name} itself: not measured by us; its memory is {memory}")
        if self.capability < _NO_LONGER_BUILT:
            major, minor = self.capability
            found.append(
                f"compute capability {major}.{minor}: torch built with CUDA 13 has no kernels for it; use a "
                "build for an older CUDA"
            )
        return tuple(found)


def _gpu(
    name: str,
    box_gb: int,
    capability: tuple[int, int],
    multiprocessors: int,
    memory: Memory = "gddr",
    *,
    reported: float | None = None,
    measured: bool = False,
) -> Gpu:
    """`reported` is in GiB; without it the nominal figure counts, less what is lost of such memory."""
    gib = box_gb * (1 - _LOST[memory]) if reported is None else reported
    threads = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(capability, 2048)
    source: Source = "measured" if measured else "nominal" if reported is None else "reported"
    usable = round(gib * GIB) - _CONTEXT
    return Gpu(name, usable, capability, multiprocessors, threads, measured, source, box_gb)


_PASCAL, _TURING, _AMPERE, _ADA, _BLACKWELL = (6, 1), (7, 5), (8, 6), (8, 9), (12, 0)
GPUS = {
    gpu.name: gpu
    for gpu in (
        # Data centres
        _gpu("gb300", 288, (10, 3), 148, "decimal"),
        _gpu("b300", 288, (10, 3), 148, "decimal"),
        _gpu("gb200", 192, (10, 0), 148, "decimal"),
        _gpu("b200", 192, (10, 0), 148, "decimal", reported=178.4),
        _gpu("b100", 192, (10, 0), 148, "decimal"),
        _gpu("h200", 141, (9, 0), 132, "hbm", reported=139.8, measured=True),
        _gpu("h200-nvl", 141, (9, 0), 132, "hbm"),
        _gpu("h100", 80, (9, 0), 132, "hbm", reported=79.1),
        _gpu("h100-pcie", 80, (9, 0), 114, "hbm"),
        _gpu("h100-nvl", 94, (9, 0), 132, "hbm"),
        _gpu("h800", 80, (9, 0), 132, "hbm"),
        _gpu("h20", 96, (9, 0), 78, "hbm"),
        _gpu("gh200", 96, (9, 0), 132, "hbm", reported=94.5),
        _gpu("gh200-144gb", 144, (9, 0), 132, "decimal"),
        _gpu("a100-80gb", 80, (8, 0), 108, "hbm", reported=79.1),
        _gpu("a100-40gb", 40, (8, 0), 108, "hbm", reported=39.4),
        _gpu("a800-80gb", 80, (8, 0), 108, "hbm"),
        _gpu("a800-40gb", 40, (8, 0), 108, "hbm"),
        _gpu("a30", 24, (8, 0), 56, "hbm", reported=23.5),
        _gpu("l40s", 48, _ADA, 142, "ecc", reported=44.4),
        _gpu("l40", 48, _ADA, 142, "ecc"),
        _gpu("l20", 48, _ADA, 92, "ecc"),
        _gpu("l4", 24, _ADA, 58, "ecc", reported=22.0),
        _gpu("a40", 48, _AMPERE, 84, "ecc"),
        _gpu("a16", 16, _AMPERE, 10, "ecc"),
        _gpu("a10", 24, _AMPERE, 72, "ecc"),
        _gpu("a10g", 24, _AMPERE, 80, "ecc", reported=22.0),
        _gpu("a2", 16, _AMPERE, 10, "ecc"),
        _gpu("t4", 16, _TURING, 40, "ecc", reported=14.6),
        _gpu("v100-32gb", 32, (7, 0), 80, "hbm", reported=31.7),
        _gpu("v100-16gb", 16, (7, 0), 80, "hbm", reported=15.8),
        _gpu("p100-16gb", 16, (6, 0), 56, "hbm"),
        _gpu("p100-12gb", 12, (6, 0), 56, "hbm"),
        _gpu("p40", 24, _PASCAL, 30, "ecc"),
        # Workstations
        _gpu("rtx-pro6000", 96, _BLACKWELL, 188, reported=94.9),
        _gpu("rtx-pro5000", 48, _BLACKWELL, 110),
        _gpu("rtx-pro4500", 32, _BLACKWELL, 82),
        _gpu("rtx-pro4000", 24, _BLACKWELL, 70),
        _gpu("rtx6000-ada", 48, _ADA, 142, reported=47.4),
        _gpu("rtx5000-ada", 32, _ADA, 100),
        _gpu("rtx4500-ada", 24, _ADA, 60),
        _gpu("rtx4000-ada", 20, _ADA, 48),
        _gpu("rtx2000-ada", 16, _ADA, 22),
        _gpu("a6000", 48, _AMPERE, 84, reported=47.4),
        _gpu("a5500", 24, _AMPERE, 80),
        _gpu("a5000", 24, _AMPERE, 64),
        _gpu("a4500", 20, _AMPERE, 56),
        _gpu("a4000", 16, _AMPERE, 48, reported=15.6),
        _gpu("a2000-12gb", 12, _AMPERE, 26),
        _gpu("a2000-6gb", 6, _AMPERE, 26),
        _gpu("quadro-rtx8000", 48, _TURING, 72, reported=47.4),
        _gpu("quadro-rtx6000", 24, _TURING, 72),
        _gpu("quadro-rtx5000", 16, _TURING, 48),
        _gpu("quadro-rtx4000", 8, _TURING, 36),
        # GeForce
        _gpu("rtx5090", 32, _BLACKWELL, 170, reported=31.4),
        _gpu("rtx5090-laptop", 24, _BLACKWELL, 82),
        _gpu("rtx5080", 16, _BLACKWELL, 84),
        _gpu("rtx5080-laptop", 16, _BLACKWELL, 60),
        _gpu("rtx5070-ti", 16, _BLACKWELL, 70),
        _gpu("rtx5070-ti-laptop", 12, _BLACKWELL, 46),
        _gpu("rtx5070", 12, _BLACKWELL, 48),
        _gpu("rtx5070-laptop", 8, _BLACKWELL, 36),
        _gpu("rtx5060-ti-16gb", 16, _BLACKWELL, 36, reported=15.4),
        _gpu("rtx5060-ti-8gb", 8, _BLACKWELL, 36),
        _gpu("rtx5060", 8, _BLACKWELL, 30),
        _gpu("rtx4090", 24, _ADA, 128, reported=23.5),
        _gpu("rtx4090-d", 24, _ADA, 114),
        _gpu("rtx4090-laptop", 16, _ADA, 76),
        _gpu("rtx4080-super", 16, _ADA, 80),
        _gpu("rtx4080", 16, _ADA, 76),
        _gpu("rtx4080-laptop", 12, _ADA, 58),
        _gpu("rtx4070-ti-super", 16, _ADA, 66),
        _gpu("rtx4070-ti", 12, _ADA, 60),
        _gpu("rtx4070-super", 12, _ADA, 56),
        _gpu("rtx4070", 12, _ADA, 46),
        _gpu("rtx4070-laptop", 8, _ADA, 36),
        _gpu("rtx4060-ti-16gb", 16, _ADA, 34),
        _gpu("rtx4060-ti-8gb", 8, _ADA, 34),
        _gpu("rtx4060", 8, _ADA, 24),
        _gpu("rtx4060-laptop", 8, _ADA, 24, reported=7.75),
        _gpu("rtx4050-laptop", 6, _ADA, 20),
        _gpu("rtx3090-ti", 24, _AMPERE, 84),
        _gpu("rtx3090", 24, _AMPERE, 82, reported=23.7),
        _gpu("rtx3080-ti", 12, _AMPERE, 80),
        _gpu("rtx3080-ti-laptop", 16, _AMPERE, 58),
        _gpu("rtx3080-12gb", 12, _AMPERE, 70),
        _gpu("rtx3080-10gb", 10, _AMPERE, 68, reported=9.75),
        _gpu("rtx3080-laptop-16gb", 16, _AMPERE, 48),
        _gpu("rtx3080-laptop-8gb", 8, _AMPERE, 48),
        _gpu("rtx3070-ti", 8, _AMPERE, 48),
        _gpu("rtx3070", 8, _AMPERE, 46, reported=7.78),
        _gpu("rtx3070-laptop", 8, _AMPERE, 40),
        _gpu("rtx3060-ti", 8, _AMPERE, 38),
        _gpu("rtx3060", 12, _AMPERE, 28),
        _gpu("rtx3060-laptop", 6, _AMPERE, 30, reported=5.8),
        _gpu("rtx3050", 8, _AMPERE, 20),
        _gpu("titan-rtx", 24, _TURING, 72),
        _gpu("rtx2080-ti", 11, _TURING, 68, reported=10.56),
        _gpu("rtx2080-super", 8, _TURING, 48),
        _gpu("rtx2080", 8, _TURING, 46),
        _gpu("rtx2070-super", 8, _TURING, 40),
        _gpu("rtx2070", 8, _TURING, 36),
        _gpu("rtx2060-super", 8, _TURING, 34),
        _gpu("rtx2060", 6, _TURING, 30, reported=5.79),
        _gpu("gtx1080-ti", 11, _PASCAL, 28, reported=10.9),
        _gpu("gtx1080", 8, _PASCAL, 20),
        _gpu("gtx1070", 8, _PASCAL, 15),
    )
}
DEFAULT = GPUS["h200"]  # whose rules are measured: taken where no GPU is named

# What drivers print around a name ("NVIDIA H100 80GB HBM3", "NVIDIA RTX 6000 Ada Generation").
_AROUND = {
    *("nvidia", "tesla", "geforce", "gpu", "generation", "blackwell", "workstation", "server", "edition"),
    *("max", "q", "hbm2", "hbm2e", "hbm3", "hbm3e", "sxm", "sxm2", "sxm3", "sxm4", "sxm5", "sxm6", "ac"),
}
# A GH200's name has the memory of its CPU; a V100S is a V100 with another clock.
_ALIASES = {
    "gh200480gb": "gh200",
    "gh200120gb": "gh200",
    "v100s32gb": "v100-32gb",
    "titanrtx": "titan-rtx",
    "rtx8000": "quadro-rtx8000",
}
_SEVERAL = re.compile(r"(?P<name>.+?)\s*x\s*(?P<count>[1-9][0-9]{0,3})", re.IGNORECASE)
_SIZE = re.compile(r"(?<![a-z0-9])(\d+) ?g(?:i?b)?(?![a-z0-9])")


def gpu_named(name: str) -> Gpu:
    """The GPU of that name, as people or nvidia-smi write it: "H100", "RTX 4090", "NVIDIA A100-SXM4-80GB".

    Where a name leaves open which of several memories it has ("a100"), the smallest is taken and `note` says
    so.
    """
    if not isinstance(name, str):
        raise TypeError(f"gpu must be the name of a GPU, not {name!r}")
    text = name.lower().replace("_", " ")
    size = _SIZE.search(text)
    words = [w for w in re.split(r"[^a-z0-9]+", _SIZE.sub(" ", text)) if w and w not in _AROUND]
    if "mig" in words:
        raise ValueError(f"gpu must be a whole GPU, not {name!r}: give the memory of a MIG slice as budget")
    for kept in (words, [word for word in words if word != "pcie"]):
        found = _meant("".join(kept), None if size is None else int(size[1]))
        if found:
            return _smallest(found, name)
    _refuse_several(name)
    plain = "".join(words)
    names = [known for known in GPUS if len(plain) > 1 and plain in _plain(known)]
    near = get_close_matches(plain, map(_plain, GPUS), n=4, cutoff=0.7)
    names = names or [known for known in GPUS if _plain(known) in near]
    more = len(names) - _SHOWN
    if more > 0:  # "rtx" alone is like 60
        closest = get_close_matches(plain, map(_plain, names), n=_SHOWN, cutoff=0.0)
        names = [known for known in names if _plain(known) in closest]
    hint = f" (like it: {', '.join(names)}{f' and {more} more' if more > 0 else ''})" if names else ""
    raise ValueError(
        f"gpu must be one of those that `batchfit predict --list-gpus` lists, not {name!r}{hint}; budget "
        "takes any number of bytes"
    )


def _refuse_several(name: str) -> None:
    """Raise where the name is one of several GPUs: "h100x8"."""
    found = _SEVERAL.fullmatch(name.strip())
    try:
        one = None if found is None else gpu_named(found["name"])
    except ValueError:
        return
    if one is not None and found is not None:
        raise ValueError(
            f"gpu must be one GPU, not {name!r}: for several, predict and explain take --gpu {one.name} "
            f"--ranks {found['count']} --shard fsdp2 (or another layout)"
        )


def _plain(name: str) -> str:
    return name.replace("-", "")


def _meant(plain: str, box_gb: int | None) -> list[Gpu]:
    """The GPUs that a name without marks may mean: the one of that name, or all that differ by their size."""
    whole = plain if box_gb is None else f"{plain}{box_gb}gb"
    for spelling in (plain, f"rtx{plain}", f"gtx{plain}", plain.removeprefix("rtx")):
        if (alias := _ALIASES.get(whole)) is not None:
            return [GPUS[alias]]
        exact = [gpu for known, gpu in GPUS.items() if _plain(known) == spelling]
        family = [gpu for known, gpu in GPUS.items() if _plain(re.sub(r"-\d+gb$", "", known)) == spelling]
        found = family if box_gb is not None else exact or family
        if found:
            return [gpu for gpu in found if box_gb in (None, gpu.box_gb)]
    return []


def _smallest(found: list[Gpu], name: str) -> Gpu:
    least = min(found, key=lambda gpu: gpu.usable_bytes)
    if len(found) == 1:
        return least
    others = " and ".join(gpu.name for gpu in found if gpu is not least)
    return replace(
        least, note=f"{name!r} is made with several memories: this is for {least.name}, not {others}"
    )
