"""The table of cards: names as people write them, and figures that cannot be right by accident."""

from __future__ import annotations

import pytest

from batchfit._engine.allocator.gpus import DEFAULT, GIB, GPUS, MIB, Gpu, gpu_named


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("h100", "h100"),
        ("H100", "h100"),
        ("NVIDIA H200", "h200"),
        ("a100_80gb", "a100-80gb"),
        ("A100 40GB", "a100-40gb"),
        ("RTX 4090", "rtx4090"),
        ("rtx-6000 ada", "rtx6000-ada"),
        ("T4", "t4"),
    ],
)
def test_a_gpu_is_found_however_it_is_written(written: str, name: str) -> None:
    assert gpu_named(written) is GPUS[name]


@pytest.mark.parametrize("name", list(GPUS))
def test_every_gpu_is_found_by_its_own_name(name: str) -> None:
    assert gpu_named(name).name == name


@pytest.mark.parametrize(
    ("printed", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA B200", "b200"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla V100S-PCIE-32GB", "v100-32gb"),
        ("Tesla P100-PCIE-16GB", "p100-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000-ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro6000"),
        ("Quadro RTX 8000", "quadro-rtx8000"),
        ("NVIDIA TITAN RTX", "titan-rtx"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "rtx4070-ti-super"),
        ("NVIDIA GeForce RTX 3060 Laptop GPU", "rtx3060-laptop"),
        ("NVIDIA GeForce GTX 1080 Ti", "gtx1080-ti"),
        ("RTX 3090 24GB", "rtx3090"),
        ("3080 12 GB", "rtx3080-12gb"),
    ],
)
def test_a_gpu_is_found_as_nvidia_smi_prints_it(printed: str, name: str) -> None:
    found = gpu_named(printed)
    assert found is GPUS[name]
    assert not found.note


@pytest.mark.parametrize(
    ("family", "least", "other"),
    [
        ("a100", "a100-40gb", "a100-80gb"),
        ("V100", "v100-16gb", "v100-32gb"),
        ("NVIDIA GeForce RTX 3080", "rtx3080-10gb", "rtx3080-12gb"),
        ("rtx4060-ti", "rtx4060-ti-8gb", "rtx4060-ti-16gb"),
    ],
)
def test_of_several_memories_the_smallest_is_taken_and_it_is_said(
    family: str, least: str, other: str
) -> None:
    found = gpu_named(family)
    assert found == GPUS[least]
    assert found.note == found.caveats[0]
    assert repr(family) in found.note
    assert f"this is for {least}, not {other}" in found.note


@pytest.mark.parametrize(
    ("written", "like"),
    [
        ("", ""),
        ("h1000", " (like it: h100)"),
        ("80GiB", ""),
        ("cuda:0", ""),
        ("a100 24GB", " (like it: a100-80gb, a100-40gb)"),
        ("rtx6000", " (like it: rtx6000-ada, quadro-rtx6000)"),
    ],
)
def test_an_unknown_gpu_is_reported_where_the_list_is(written: str, like: str) -> None:
    with pytest.raises(ValueError, match="gpu must be one of those") as refused:
        gpu_named(written)
    assert f"--list-gpus` lists, not {written!r}{like}; budget" in str(refused.value)


def test_a_slice_of_a_gpu_is_not_taken_for_all_of_it() -> None:
    with pytest.raises(ValueError, match=r"gpu must be a whole GPU, not .*: give the memory of a MIG slice"):
        gpu_named("NVIDIA A100-SXM4-40GB MIG 3g.20gb")


@pytest.mark.parametrize("card", GPUS.values(), ids=GPUS)
def test_a_gpu_leaves_less_than_its_box_says_but_not_by_much(card: Gpu) -> None:
    assert 0.83 * card.box_gb * 1e9 < card.usable_bytes < card.box_gb * GIB
    if card.name.endswith("gb"):
        assert card.name.endswith(f"-{card.box_gb}gb")


def test_a_nominal_figure_is_never_above_what_its_kind_was_seen_to_report() -> None:
    """The shares that the module's rules name: whoever lowers one has to raise the figures behind it."""
    seen = {"rtx2080-ti": 10.57, "rtx3070": 7.78, "rtx2060": 5.79, "a4000": 15.61, "rtx5060-ti-16gb": 15.44}
    for name, gib in seen.items():
        assert GPUS[name].box_gb * 0.96 <= gib + 0.001, name
    for name, gib in {"t4": 14.56, "l4": 22.0, "l40s": 44.4, "a10g": 22.0}.items():
        assert GPUS[name].box_gb * 0.91 <= gib, name
    for name, gib in {"h100": 79.1, "a100-40gb": 39.4, "a30": 23.53, "v100-16gb": 15.77}.items():
        assert GPUS[name].box_gb * 0.98 <= gib, name
    assert GPUS["rtx4070"].source == "nominal"
    assert GPUS["rtx4070"].usable_bytes == round(12 * 0.96 * GIB) - 560 * MIB
    assert any("derived from 12 GB nominal" in one for one in GPUS["rtx4070"].caveats)
    assert any("what CUDA reports there" in one for one in GPUS["rtx4090"].caveats)


def test_a_gpu_that_new_builds_have_no_kernels_for_says_so() -> None:
    assert any("CUDA 13 has no kernels" in one for one in GPUS["p100-16gb"].caveats)
    assert any("7.0" in one for one in GPUS["v100-16gb"].caveats)
    assert not any("kernels" in one for one in GPUS["t4"].caveats)


def test_only_what_was_measured_says_so() -> None:
    assert [name for name, card in GPUS.items() if card.measured] == ["h200"]
    assert DEFAULT.measured
    assert not DEFAULT.caveats


def test_what_hopper_does_otherwise() -> None:
    assert GPUS["h100"].blas_bytes == 32 * MIB
    assert GPUS["a100-80gb"].blas_bytes == 8 * MIB + 128 * 1024
    assert GPUS["h100"].prefers_cudnn_attention
    assert not GPUS["rtx4090"].prefers_cudnn_attention


@pytest.mark.parametrize("written", ["h100x8", "NVIDIA H100 x 8"])
def test_several_gpus_are_told_how_to_be_asked_for(written: str) -> None:
    with pytest.raises(ValueError, match="take --gpu h100 --ranks 8 --shard fsdp2"):
        gpu_named(written)
