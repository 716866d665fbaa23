"""Whatever changes how a model holds or computes its weights works with a cache, put on before or after it.

``enable_model_cpu_offload`` of a pipeline refuses to run without an accelerator, so its accelerate primitives stand in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from accelerate.hooks import remove_hook_from_module
from conftest import SIGMAS, Scripted, attach, drive, equal_steps, record_of
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.group_offloading import ModuleGroup
from peft import LoraConfig
from torch import nn

import cachedit
from zoo.models import CASES, Case, count_blocks

CPU = torch.device("cpu")
COMPUTE = (0, 1, 4, 7)  # the other 6 of 10 steps are reused
NAMES = ["flux", "wan"]

Change = Callable[[nn.Module], Any]


def wrap(model: nn.Module, case: Case) -> nn.Module:
    return attach(model, case, Scripted(compute=COMPUTE))


def changed(case: Case, change: Change, order: str) -> nn.Module:
    """A fresh model, wrapped and changed in this order."""
    model = case.build()
    for act in (lambda: wrap(model, case), lambda: change(model))[:: 1 if order == "wrap first" else -1]:
        act()
    return model


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def far(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all((a - b).abs().max() > 1e-2 for a, b in zip(ours, theirs, strict=True))


both_orders = pytest.mark.parametrize("order", ["wrap first", "change first"])
models = pytest.mark.parametrize("name", NAMES)


# -- offload ------------------------------------------------------------------------------------------------------


def model_offload(model: nn.Module) -> None:
    cpu_offload_with_hook(model, execution_device=CPU)


def sequential_offload(model: nn.Module) -> None:
    cpu_offload(model, execution_device=CPU)


def group_offload(model: nn.Module, **options: Any) -> None:
    try:
        apply_group_offloading(nn.Sequential(nn.Linear(1, 1)), CPU, CPU, offload_type="leaf_level")
    except AttributeError:
        pytest.skip("before 0.41 diffusers asks which accelerator there is, and fails where there is none")
    apply_group_offloading(model, CPU, CPU, **options)


def block_groups(model: nn.Module) -> None:
    group_offload(model, offload_type="block_level", num_blocks_per_group=1)


def leaf_groups(model: nn.Module) -> None:
    group_offload(model, offload_type="leaf_level")


@both_orders
@pytest.mark.parametrize("offload", [model_offload, sequential_offload, block_groups, leaf_groups])
@models
def test_offload_changes_no_result(name: str, offload: Change, order: str) -> None:
    case = CASES[name]
    wanted = drive(wrap(case.build(), case), case)
    model = changed(case, offload, order)
    for _ in range(2):  # the second run meets weights that went back and forth
        assert len(equal_steps(drive(model, case), wanted)) == len(SIGMAS)
        assert record_of(model).computed_steps == list(COMPUTE)
    cachedit.unwrap(model)
    assert len(equal_steps(drive(model, case), drive(case.build(), case))) == len(SIGMAS)


@both_orders
def test_weights_offloaded_sequentially_stay_away_on_reused_steps(order: str) -> None:
    case = CASES["wan"]
    model = changed(case, sequential_offload, order)
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    with count_blocks(model, case) as count:
        drive(model, case)
    assert count.per_block == [len(COMPUTE)] * 4
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    cachedit.unwrap(model)
    remove_hook_from_module(model, recurse=True)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


@contextmanager
def onloaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[nn.Module]]:
    """Modules whose group is brought to the device."""
    seen: list[nn.Module] = []
    onload = ModuleGroup.onload_

    def noting(group: ModuleGroup, *args: Any, **kwargs: Any) -> Any:
        seen.extend(group.modules)
        return onload(group, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ModuleGroup, "onload_", noting)
        yield seen


@both_orders
@pytest.mark.parametrize("offload", [block_groups, leaf_groups])
@models
def test_skipped_blocks_are_not_brought_to_the_device(
    name: str, offload: Change, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    model = changed(case, offload, order)
    inside = {module for block in case.blocks(model) for module in block.modules()}
    fetched = []
    for sigma in SIGMAS:
        with onloaded(monkeypatch) as seen:
            case.call(model, sigma)
        fetched.append(any(module in inside for module in seen))
        assert seen  # what is outside the stack is needed at every step
    assert [step for step, was in enumerate(fetched) if was] == list(COMPUTE)


# -- LoRA ---------------------------------------------------------------------------------------------------------


def add_lora(model: nn.Module) -> None:
    torch.manual_seed(0)
    model.add_adapter(  # type: ignore[operator]
        LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v"], init_lora_weights=False), "style"
    )


@both_orders
@models
def test_lora_before_and_after_wrap(name: str, order: str) -> None:
    case = CASES[name]
    plain = drive(wrap(case.build(), case), case)
    model = changed(case, add_lora, order)
    styled = drive(model, case)
    assert far(styled, plain)

    uncached = case.build()
    add_lora(uncached)
    assert equal_steps(styled, drive(uncached, case)) == list(COMPUTE)  # every computed step, and only those
    assert set(model.state_dict()) == set(uncached.state_dict())

    model.disable_adapters()  # type: ignore[operator]
    assert_close(drive(model, case), plain)
    model.enable_adapters()  # type: ignore[operator]
    assert len(equal_steps(drive(model, case), styled)) == len(SIGMAS)
    model.delete_adapters("style")  # type: ignore[operator]
    assert_close(drive(model, case), plain)


@models
def test_unwrap_leaves_the_lora(name: str) -> None:
    case = CASES[name]
    model, uncached = changed(case, add_lora, "wrap first"), case.build()
    add_lora(uncached)
    cachedit.unwrap(model)
    assert len(equal_steps(drive(model, case), drive(uncached, case))) == len(SIGMAS)


@models
def test_a_fused_lora_takes_effect(name: str) -> None:
    case = CASES[name]
    styled = drive(changed(case, add_lora, "wrap first"), case)
    model = changed(case, add_lora, "wrap first")
    model.fuse_lora()  # type: ignore[operator]
    for ours, theirs in zip(drive(model, case), styled, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


# -- replaced modules ---------------------------------------------------------------------------------------------


class EightBit(nn.Module):
    """A Linear whose weights are rounded to 8 bits, as a quantiser puts into the place of the original."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7  # coarse, so that the difference is plain
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.float() * self.scale, self.bias)


def quantise(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, EightBit(child))
        else:
            quantise(child)


def quantise_blocks(model: nn.Module) -> None:
    for name in ("transformer_blocks", "single_transformer_blocks", "blocks"):
        quantise(getattr(model, name, nn.Module()))


@both_orders
@models
def test_quantised_linears_take_effect(name: str, order: str) -> None:
    case = CASES[name]
    model, uncached = changed(case, quantise_blocks, order), case.build()
    quantise_blocks(uncached)
    outputs = drive(model, case)
    assert equal_steps(outputs, drive(uncached, case)) == list(COMPUTE)
    assert far(outputs, drive(wrap(case.build(), case), case))


class Doubled(nn.Module):
    """Stands for whatever wraps a block as a whole: ``torch.compile(block)``, FSDP, a checkpointing wrapper."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states + 2 * (self.block(hidden_states, *args, **kwargs) - hidden_states)


def replace_a_block(model: nn.Module) -> None:
    model.blocks[1] = Doubled(model.blocks[1])  # type: ignore[index, operator, union-attr]


def test_a_block_that_is_replaced_after_wrap_takes_effect() -> None:
    case, uncached = CASES["wan"], CASES["wan"].build()
    replace_a_block(uncached)
    model = changed(case, replace_a_block, "wrap first")
    assert equal_steps(drive(model, case), drive(uncached, case)) == list(COMPUTE)
