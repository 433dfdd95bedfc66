"""The walks of ARCHITECTURE.md: how many modules a call enters, none of them for several ranks."""

from __future__ import annotations

import re

from benchmark_scripts import run

# One more here is worth a thought: is there a module that a reader opens for a single function?
MOST_MODULES = {"find": 30, "predict": 30, "first backward": 17, "backward": 14}
OF_RANKS = re.compile(
    r"_engine\.data_parallel\.(?!single$)|_engine\.distributed\.fsdp_reset$|snapshot\.wrappers$"
)


def test_the_walks_are_no_longer_and_one_process_enters_no_code_of_ddp_or_fsdp2() -> None:
    walks: dict[str, list[str]] = {}
    for line in run("walks", "--list").splitlines():
        if not line.startswith("  "):
            modules = walks[line.partition(":")[0]] = []
        else:
            modules.append(line.strip())
    assert {name: len(modules) for name, modules in walks.items() if len(modules) > MOST_MODULES[name]} == {}
    assert set(walks) == set(MOST_MODULES)
    assert [module for modules in walks.values() for module in modules if OF_RANKS.search(module)] == []
    assert "_engine.data_parallel.single" in walks["backward"]
