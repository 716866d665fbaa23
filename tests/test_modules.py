"""Attention and feed-forward modules as a site: found in every family, given without being run, left as they were."""

from __future__ import annotations

import copy
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import dissect
from diffusers import UNet2DModel
from diffusers.models.attention import BasicTransformerBlock, JointTransformerBlock
from torch import nn
from torch._dynamo.testing import CompileCounter

from cachedit import UnsupportedModelError
from cachedit.feature.modules import ModulePlace, Unit, find_modules
from cachedit.feature.place import Forecast, Residual
from cachedit.strategy import Module
from zoo.models import CASES
from zoo.unet_models import UNETS

COUNTS: dict[str, dict[str, int]] = {
    **{name: {"attn": 4, "mlp": 4} for name in ("dit", "lumina2", "z_image", "cogvideox")},  # refiners do not count
    "cogview4": {"attn": 4, "mlp": 4},  # one feed-forward for both streams
    **{name: {"attn": 4, "mlp": 4 + 3} for name in ("sd3", "mochi")},  # the last block drops the text
    "qwenimage": {"attn": 4, "mlp": 2 * 4},
    **{name: {"attn": 4, "cross": 4, "mlp": 4} for name in ("pixart", "sana", "ltx", "allegro")},
    **{name: {"attn": 4, "cross": 4, "mlp": 4} for name in ("wan", "wan_ti2v", "wan_vace")},  # VACE's own do not count
    **{name: {"attn": 4, "cross": 4, "mlp": 4} for name in ("skyreels_v2", "skyreels_v2_df")},
    "hunyuandit": {"attn": 6, "cross": 6, "mlp": 6},
    **{name: {"attn": 2 + 3, "mlp": 2 * 2 + 3} for name in ("auraflow", "flux", "chroma", "hunyuanvideo")},
    "flux2": {"attn": 2 + 3, "mlp": 2 * 2},  # single blocks: one fused module, found as attention
    "ltx2": {"attn": 4 * 4, "cross": 2 * 4, "mlp": 2 * 4},  # attn: video, audio, and either to the other
    "latte": {"attn": 2, "temporal": 2, "cross": 2, "mlp": 2 + 2},
    "plain": {"mlp": 4},
}
ALL = {**CASES, **UNETS}


@functools.cache
def built(name: str) -> nn.Module:
    return ALL[name].build()


@functools.cache
def plain(name: str, sigma: float = 0.5) -> torch.Tensor:
    return ALL[name].call(built(name), sigma)


def kinds_of(name: str) -> Counter[str]:
    names = {id(module): path for path, module in built(name).named_modules()}
    found = find_modules(built(name), [names[id(block)] for block in ALL[name].blocks(built(name))] or None)
    return Counter(kind for _, _, kind, _ in found)


PAIRS = [(name, kind) for name in ALL for kind in kinds_of(name)]
every_case = pytest.mark.parametrize("name", ALL)
every_pair = pytest.mark.parametrize(("name", "kind"), PAIRS, ids=map("-".join, PAIRS))


@contextmanager
def attached(name: str, kind: str, model: nn.Module | None = None) -> Iterator[ModulePlace]:
    model = built(name) if model is None else model
    place = ModulePlace(Module(kind), model, ALL[name].blocks(model) or None)  # UNets have no stack
    place.attach()
    try:
        yield place
    finally:
        place.detach()


def run(place: ModulePlace, name: str, reused: Any = False, history: Any = (), sigma: float = 0.5, **extra: Any) -> Any:
    place.begin(reused, Forecast(history) if history else None)
    output = ALL[name].call(place.denoiser, sigma, **extra)
    place.end()
    return output


def capture(place: ModulePlace, name: str) -> Residual:
    run(place, name)
    captured = place.captured()
    assert captured is not None
    return captured


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@contextmanager
def counted(model: nn.Module) -> Iterator[Counter[str]]:
    """How often the forward of every module is run, in the order of their first runs."""
    runs: Counter[str] = Counter()

    def counting(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (runs.update([name]), forward(*args, **kwargs))[1]

    modules = dict(model.named_modules())
    for name, module in modules.items():
        module.__dict__["forward"] = counting(name, module.forward)
    yield runs
    for module in modules.values():
        del module.__dict__["forward"]


# -- what is found ------------------------------------------------------------------------------------------------


@every_case
def test_every_family_has_these_kinds(name: str) -> None:
    expected = COUNTS.get(name)
    if expected is None:  # UNets, by the number of their transformer blocks
        paths = [path for path, m in built(name).named_modules() if "BasicTransformerBlock" in type(m).__name__]
        motion = sum("motion_modules" in path for path in paths)  # two self-attentions
        stable = sum("temporal_transformer_blocks" in path for path in paths)  # two feed-forwards
        spatial = len(paths) - motion - stable
        sums = {"attn": spatial, "temporal": 2 * motion + stable, "cross": spatial + stable, "mlp": len(paths) + stable}
        expected = {kind: count for kind, count in sums.items() if count}
    assert kinds_of(name) == expected


@every_pair
def test_units_are_in_order_and_know_their_layer(name: str, kind: str) -> None:
    with attached(name, kind) as place, counted(place.denoiser) as runs:
        run(place, name)
    units = place.units
    assert {unit.kind for unit in units} == {kind}
    assert [place.denoiser.get_submodule(unit.name) for unit in units] == place.modules
    assert [unit.layer for unit in units] == sorted(unit.layer for unit in units)
    if name not in ("latte", "unet-motion"):  # where two lists alternate
        assert [unit.name for unit in units] == [path for path in runs if path in {unit.name for unit in units}]


def test_an_attention_is_what_its_structure_says() -> None:
    def kinds(block: nn.Module) -> dict[str, str]:
        return {name: kind for name, _, kind, _ in find_modules(block)}

    size: dict[str, Any] = {"dim": 8, "num_attention_heads": 2, "attention_head_dim": 4}
    assert kinds(JointTransformerBlock(**size, use_dual_attention=True))["attn2"] == "attn"
    both = BasicTransformerBlock(**size, cross_attention_dim=8, double_self_attention=True)
    assert kinds(both) == {"attn1": "attn", "attn2": "attn", "ff": "mlp"}
    only = BasicTransformerBlock(**size, cross_attention_dim=8, only_cross_attention=True)
    assert kinds(only) == {"attn1": "cross", "attn2": "cross", "ff": "mlp"}


def test_a_kind_that_is_not_there_is_refused_with_those_that_are() -> None:
    model = built("flux")
    with pytest.raises(UnsupportedModelError, match=r"Flux.*'cross'.*'attn' \(5\), 'mlp' \(7\).*Choose"):
        ModulePlace(Module("cross"), model, CASES["flux"].blocks(model))
    # its attentions add their own input, so what they give is the whole stream
    unet = UNet2DModel(
        sample_size=8, block_out_channels=(8,), norm_num_groups=4, layers_per_block=1,
        down_block_types=("AttnDownBlock2D",), up_block_types=("AttnUpBlock2D",),
    )  # fmt: skip
    with pytest.raises(UnsupportedModelError, match="UNet2DModel.*'attn'.*none"):
        ModulePlace(Module("attn"), unet, None)


# -- computed and reused ------------------------------------------------------------------------------------------


@every_pair
def test_a_reused_pass_is_exact_and_runs_no_unit(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    note = Unit.note

    def noted(unit: Unit, out: Any) -> None:
        given.append(described(out))
        note(unit, out)

    monkeypatch.setattr(Unit, "note", noted)
    with attached(name, kind) as place:
        with counted(place.denoiser) as full:
            captured = capture(place, name)
        with counted(place.denoiser) as some:
            reused = run(place, name, True, [captured])
        moved = run(place, name, True, [captured], sigma=0.2)
        assert torch.equal(run(place, name), plain(name))
    assert relative(reused, plain(name)) < 1e-6
    # Otherwise exactness would show nothing. Attention to a single token does not depend on who asks.
    assert torch.equal(moved, plain(name, 0.2)) == ((name, kind) == ("unet-svd", "cross"))
    assert given == given[: len(given) // 4] * 4
    inside = tuple(f"{unit.name}." for unit in place.units)
    assert {unit.name for unit in place.units} <= set(full)
    assert some == {path: count for path, count in full.items() if not f"{path}.".startswith(inside)}


def described(out: Any) -> Any:
    if isinstance(out, torch.Tensor):
        return out.shape, out.dtype
    return None if out is None else (type(out), [described(x) for x in out])


@every_pair
def test_some_units_can_be_reused(name: str, kind: str) -> None:
    with attached(name, kind) as place:
        old = capture(place, name)
        odd = [unit.index for unit in place.units if unit.index % 2]
        with counted(place.denoiser) as runs:
            moved = run(place, name, odd, [old], sigma=0.2)
        new = place.captured()
        assert new is not None
        owners = [unit.index for unit in place.units for _ in unit.tensors()]
        assert [a is b for a, b in zip(old, new, strict=True)] == [owner in odd for owner in owners]
        assert [unit.index for unit in place.units if not runs[unit.name]] == odd
        assert torch.equal(run(place, name, odd, [new], sigma=0.2), moved)
        assert torch.equal(run(place, name, [], [new], sigma=0.2), plain(name, 0.2))


def test_a_feed_forward_in_chunks_is_told_apart_by_the_order_of_its_calls() -> None:
    model = CASES["pixart"].build()
    for block in CASES["pixart"].blocks(model):
        block.set_chunk_feed_forward(4, dim=1)  # type: ignore[operator]
    with attached("pixart", "mlp", model) as place:
        captured = capture(place, "pixart")
        assert len(captured) > len(place.units)
        assert relative(run(place, "pixart", True, [captured]), plain("pixart")) < 1e-6


# -- units that are not reached, and what cannot be kept ----------------------------------------------------------


def test_a_pass_that_misses_a_unit_captures_nothing() -> None:
    with attached("sd3", "attn") as place:
        captured = capture(place, "sd3")
        run(place, "sd3", skip_layers=[1])
        assert place.captured() is None
        assert relative(run(place, "sd3", True, [captured]), plain("sd3")) < 1e-6
        place.refresh()  # a new run, which knows nothing yet of that unit
        run(place, "sd3", skip_layers=[1])
        part = place.captured()
        assert part is not None
        assert len(part) == len(captured) * 3 // 4
        assert torch.equal(run(place, "sd3", True, [captured]), plain("sd3"))  # not its tensors: computed


class Pair(nn.Module):
    """Two blocks with a feed-forward that is used as told."""

    def __init__(self, use: Callable[..., torch.Tensor], ff: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"ff": ff()}) for _ in range(2))
        self.use = use

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + self.use(block["ff"](x))  # type: ignore[index]
        return x


def begun(use: Callable[..., torch.Tensor], ff: Callable[[], nn.Module]) -> tuple[Pair, ModulePlace]:
    place = ModulePlace(Module("mlp"), model := Pair(use, ff), [*model.blocks])
    place.attach()
    place.begin(False, None)
    return model, place


def test_a_model_that_writes_into_an_output_is_refused_or_given_copies() -> None:
    model, place = begun(lambda x: x.mul_(0.5), lambda: nn.Linear(4, 4))
    full = model(x := torch.ones(1, 2, 4))
    with pytest.raises(UnsupportedModelError, match=r"blocks.0.ff.*x = gate"):
        place.captured()
    place.end()
    with torch.inference_mode():  # where nobody counts the writes
        place.begin(False, None)
        model(x)
        captured = place.captured()
        assert captured is not None
        for _ in range(2):
            place.end()
            place.begin(True, Forecast([captured]))
            assert torch.equal(model(x), full)


def test_an_output_of_an_unknown_type_is_refused() -> None:
    model, place = begun(lambda x: x["x"], nn.Identity)
    with pytest.raises(UnsupportedModelError, match=r"blocks.0.ff returns a dict"):
        model({"x": torch.ones(1, 2, 4)})


# -- what stays as it was -----------------------------------------------------------------------------------------


@every_pair
def test_an_attached_model_looks_and_runs_as_ever_and_a_detached_one_is_the_same(name: str, kind: str) -> None:
    model, expected = built(name), plain(name)
    before, keys, visible = dissect(model), list(model.state_dict()), str(model)
    with attached(name, kind) as place:
        assert torch.equal(ALL[name].call(model), expected)
        captured = capture(place, name)
        assert torch.equal(ALL[name].call(model), expected)
        assert (str(model), list(model.state_dict())) == (visible, keys)
        held = [weakref.ref(x) for x in captured]
        run(place, name, True, [captured], sigma=0.2)
        del captured
        place.release()
        assert [ref() for ref in held] == [None] * len(held)
    assert dissect(model) == before


@every_case
def test_a_copy_is_independent(name: str) -> None:
    kind = next(iter(kinds_of(name)))
    with attached(name, kind) as place:
        captured = capture(place, name)
        twin = copy.deepcopy(place)
        assert relative(run(twin, name, True, [captured]), plain(name)) < 1e-6
        with torch.no_grad():
            for p in twin.denoiser.parameters():
                p.add_(0.1)
        twin.begin(True, Forecast([captured]))  # the twin waits for a pass of its own
        assert torch.equal(ALL[name].call(place.denoiser), plain(name))
        twin.end()
        twin.detach()
        assert not torch.equal(ALL[name].call(twin.denoiser), plain(name))
        assert relative(run(place, name, True, [captured]), plain(name)) < 1e-6


def test_two_kinds_are_independent_and_one_is_watched_once() -> None:
    hooked: list[str] = []
    model = CASES["flux"].build()
    with attached("flux", "attn", model) as attn, attached("flux", "mlp", model) as mlp:
        for place in (attn, mlp):
            place.modules[0].register_forward_hook(lambda *_, kind=place.kind: hooked.append(kind))
        old, new = capture(attn, "flux"), capture(mlp, "flux")
        assert hooked == ["attn", "mlp"] * 2
        for reused in (False, True):
            mlp.begin(True, Forecast([new]))
            assert relative(run(attn, "flux", reused, [old]), plain("flux")) < 1e-6
            mlp.end()
        assert hooked == ["attn", "mlp"] * 2 + ["attn"]
        with pytest.raises(ValueError, match="already"):
            ModulePlace(Module("mlp"), model, CASES["flux"].blocks(model)).attach()


def test_modules_that_were_replaced_are_found_again() -> None:
    model = CASES["flux"].build()
    with attached("flux", "mlp", model) as place:
        block, old = model.get_submodule("single_transformer_blocks.2"), place.modules[-1]
        block.proj_mlp = nn.Sequential(old)
        place.refresh()
        assert (place.modules[-1], type(old)) == (block.proj_mlp, nn.Linear)
        captured = capture(place, "flux")
        with counted(model) as runs:
            assert relative(run(place, "flux", True, [captured]), plain("flux")) < 1e-6
        assert not runs["single_transformer_blocks.2.proj_mlp.0"]
    assert type(block.proj_mlp) is nn.Sequential


def test_a_compiled_model_has_one_graph_for_each_way_to_run() -> None:
    graphs = CompileCounter()
    model = CASES["plain"].build()
    with attached("plain", "mlp", model) as place, torch.no_grad():
        place.denoiser = compiled = torch.compile(model, backend=graphs, fullgraph=True)  # type: ignore[assignment]
        assert torch.equal(CASES["plain"].call(compiled), plain("plain"))  # type: ignore[arg-type]
        for _ in range(3):
            captured = capture(place, "plain")
            assert torch.equal(run(place, "plain", True, [captured]), plain("plain"))
    assert graphs.frame_count == 3
