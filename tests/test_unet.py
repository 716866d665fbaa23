"""Skip places: the deep part of a UNet is replaced by the feature that it last gave, all else runs and is fresh."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from conftest import dissect
from torch import nn

from cachedit.errors import UnsupportedModelError
from cachedit.feature.place import Forecast
from cachedit.feature.unet import SkipPlace, UNetBody
from cachedit.strategy import Skip
from zoo.case import Case, discrete
from zoo.draw import Draw, settle
from zoo.more_unets import MORE_UNETS
from zoo.unet_models import ADAPTER_CONTROL, FRAMES, UNETS, sd_inputs


def unet(cls: str, down: str, up: str, **config: Any) -> Callable[[], Any]:
    """Builder of a model with two levels of one layer each."""
    config |= {"down_block_types": (down,) * 2, "up_block_types": (up,) * 2, "layers_per_block": 1, "sample_size": 8}
    return lambda: getattr(diffusers, cls)(block_out_channels=(32, 32), norm_num_groups=8, **config)


DDPM = unet("UNet2DModel", "AttnDownBlock2D", "AttnUpBlock2D", in_channels=4, out_channels=4)  # blocks by position
PIXELS = unet("UNet2DConditionModel", "SimpleCrossAttnDownBlock2D", "SimpleCrossAttnUpBlock2D", cross_attention_dim=16)
CASES = {
    **UNETS,
    "unet-3d": next(replace(case, name="unet-3d") for case in MORE_UNETS if case.name == "UNet3DConditionModel"),
    "ddpm": Case("ddpm", lambda: settle(DDPM()), lambda seed, n: {"sample": Draw(seed, n)(4, 8, 8)}, discrete, ()),
    "pixels": Case("pixels", lambda: settle(PIXELS()), sd_inputs, discrete, ()),
}
LAYER_PARTS = ("resnets", "temp_convs", "attentions", "temp_attentions", "motion_modules")
LAYERS = {"unet-sd": (3, 3, 3), "unet-sdxl": (3, 3, 3), "unet-motion": (3, 3), "unet-svd": (3, 2), "unet-3d": (3, 3)}
SITES = {name: [Skip(i, k) for i, n in enumerate(LAYERS.get(name, (2, 2))) for k in range(n)] for name in CASES}
DOWN0 = ["down0.resnet0", "down0.attention0", "down0.resnet1", "down0.attention1"]
UP2 = [f"up2.{kind}{i}" for i in range(3) for kind in ("resnet", "attention")]
RUNS = {
    Skip(0, 0): UP2[4:],
    Skip(0, 1): [*DOWN0[:2], *UP2[2:]],
    Skip(0, 2): [*DOWN0, *UP2],
    Skip(1, 0): [*DOWN0, "down0.downsampler0", "up1.resnet2", "up1.attention2", "up1.upsampler0", *UP2],
}
WHOLE = 30  # modules: 5, 5 and 2 down, the middle, 4, 7 and 6 up
SETTINGS = {
    "unet-sd": ("as is", "control", "adapter", "freeu", "odd"),
    "unet-sdxl": ("as is", "control", "adapter"),
    "unet-motion": ("as is", "control", "freeu", "odd"),
    "unet-svd": ("as is", "odd"),
}
FEW = [(name, setting) for name in CASES for setting in SETTINGS.get(name, ("as is",))]
MANY = [(*few, site) for few in FEW for site in SITES[few[0]] if few[1] == "as is" or site in (*RUNS, Skip(1, 2))]


class Rig:
    """A model with places, and calls of it in one setting."""

    def __init__(self, model: Any, name: str, setting: str, batch: int, sites: tuple[Skip, ...]) -> None:
        self.model, self.case, self.setting, self.batch = model, CASES[name], setting, batch
        if setting == "freeu":
            model.enable_freeu(s1=0.6, s2=0.4, b1=1.3, b2=1.5)
        self.body = UNetBody(model)
        self.places = [self.body.place(site) for site in sites]
        self.body.attach()

    def added(self, seed: int) -> dict[str, Any]:
        """Drawn anew for every call, because a forward may empty it."""
        if self.setting == "odd":
            shape = {"unet-motion": (4, FRAMES), "unet-svd": (FRAMES, 8)}.get(self.case.name, (4,))
            return {"sample": Draw(seed, self.batch)(*shape, 7, 5)}
        source = {"control": self.case.control, "adapter": ADAPTER_CONTROL.get(self.case.name)}.get(self.setting)
        return source(seed + 100, self.batch) if source else {}

    def __call__(self, seed: int = 0, sigma: float = 0.5, **given: Any) -> torch.Tensor:
        return self.case.call(self.model, sigma, seed, self.batch, **{**self.added(seed), **given})

    @contextmanager
    def tracked(self, reused: SkipPlace | None = None, forecast: Any = None, hollow: bool = False) -> Iterator[None]:
        """A pass as the runner makes it."""
        for place in self.places:
            place.begin(place is reused, forecast if place is reused else None)
        self.body.begin(hollow)
        try:
            yield
        finally:
            self.body.end()
            for place in self.places:
                place.end()

    def compute(self, *call: Any) -> list[Any]:
        """What each place captures in a computed pass."""
        with self.tracked():
            self(*call)
        return [captured[0] for captured in (place.captured() for place in self.places) if captured is not None]

    def reuse(self, feature: torch.Tensor, *call: Any, place: int = 0, **given: Any) -> torch.Tensor:
        """The output of a pass that reuses a place."""
        with self.tracked(self.places[place], Forecast([(feature,)])):
            return self(*call, **given)


@functools.cache
def built(name: str) -> Any:
    return CASES[name].build()


@pytest.fixture
def rig() -> Iterator[Callable[..., Rig]]:
    made: list[Rig] = []

    def make(name: str, *sites: Skip, setting: str = "as is", batch: int = 1, model: Any = None) -> Rig:
        made.append(Rig(model or built(name), name, setting, batch, sites or (Skip(0, 1),)))
        return made[-1]

    yield make
    for one in made:
        one.body.detach()
        for block in one.model.up_blocks:
            for name in ("s1", "s2", "b1", "b2"):
                block.__dict__.pop(name, None)


@contextmanager
def entering(model: Any, site: Skip, feature: torch.Tensor) -> Iterator[None]:
    """A model that runs as a whole, but in which ``feature`` enters the layer: what a reuse should give."""
    block = model.up_blocks[-1 - site.level]
    index = len(block.resnets) - 1 - site.layer

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ((feature.clone(), *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": feature.clone()})

    def after(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return (feature.clone(),) if isinstance(out, tuple) else feature.clone()

    lists = [
        getattr(block, name, None)
        for name in ("motion_modules", "temp_attentions", "attentions", "temp_convs", "resnets")
    ]
    last = next(modules for modules in lists if modules)[index - 1]
    handle = last.register_forward_hook(after) if index else block.register_forward_pre_hook(before, with_kwargs=True)
    yield
    handle.remove()


@contextmanager
def executed(model: nn.Module) -> Iterator[list[str]]:
    """Names of the layers that really run, in order; "mid" for the first of the middle block."""
    ran: list[str] = []
    handles = []
    for name, module in model.named_modules():
        parts = name.split(".")
        if (len(parts) == 4 and parts[0] in ("down_blocks", "up_blocks")) or name == "mid_block.resnets.0":
            short = f"{parts[0][:-7]}{parts[1]}.{parts[2][:-1]}{parts[3]}" if len(parts) == 4 else "mid"
            handles.append(module.register_forward_pre_hook(lambda *_, short=short: ran.append(short)))
    yield ran
    for handle in handles:
        handle.remove()


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Greatest difference over the greatest value."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.mark.parametrize(("name", "setting", "site"), MANY, ids=str)
def test_a_reuse_is_the_model_with_the_feature_entering_the_layer(rig: Any, name: str, setting: str, site: Any) -> None:
    one = rig(name, site, setting=setting)
    block = one.model.up_blocks[-1 - site.level]
    layer, seen = block.resnets[len(block.resnets) - 1 - site.layer], []
    plain, changed = one(), one(3, 0.2)
    handle = layer.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["input_tensor"]), with_kwargs=True
    )
    with one.tracked():
        assert torch.equal(one(), plain)
    handle.remove()
    (feature,) = one.places[0].captured()
    assert 0 < feature.shape[1] < seen[0].shape[1]
    assert setting == "freeu" or torch.equal(feature, seen[0][:, : feature.shape[1]])
    kept = feature.clone()
    assert distance(one.reuse(feature), plain) < 1e-6
    reused = one.reuse(feature, 3, 0.2)
    with entering(one.model, site, kept):
        assert distance(reused, one(3, 0.2)) < 1e-6
    assert distance(reused, changed) > 1e-4  # else the cached feature would not matter
    assert torch.equal(feature, kept)  # FreeU writes into what enters a layer


@pytest.mark.parametrize("site", [*RUNS, Skip(2, 2)], ids=str)
def test_a_reused_pass_runs_these_layers_and_no_other(rig: Any, site: Skip) -> None:
    one = rig("unet-sd", site)
    with executed(one.model) as whole:
        (feature,) = one.compute()
    with executed(one.model) as ran:
        one.reuse(feature)
    assert ran == RUNS.get(site, [name for name in whole if name != "mid"])  # the deepest leaves out the middle alone
    with executed(one.model) as ran:
        one()
    assert ran == whole
    assert len(whole) == WHOLE


def test_what_a_controlnet_adds_is_fresh_where_layers_run_and_cached_at_depth(rig: Any) -> None:
    one = rig("unet-sd", Skip(0, 0), setting="control")
    (feature,) = one.compute()
    model, added, down = one.model, one.added(0), "down_block_additional_residuals"
    other = torch.randn(1, 16, 8, 8)
    shallow = one.reuse(feature, **{**added, down: (other, *added[down][1:])})
    deep = one.reuse(feature, **{down: (added[down][0], *[r + 1 for r in added[down][1:]])})
    sample, text = sd_inputs(0, 1).values()
    with torch.no_grad():
        emb = model.time_embedding(model.get_time_embed(sample, discrete(0.5, 1)["timestep"]))
        x = torch.cat([feature, model.conv_in(sample) + other], dim=1)
        x = model.up_blocks[-1].resnets[-1](x, emb)
        x = model.up_blocks[-1].attentions[-1](x, encoder_hidden_states=text, return_dict=False)[0]
        by_hand = model.conv_out(model.conv_act(model.conv_norm_out(x)))
    assert distance(shallow, by_hand) < 1e-6
    assert distance(shallow, one()) > 0.01
    assert torch.equal(deep, one.reuse(feature))


@pytest.mark.parametrize(("name", "setting"), FEW)
def test_a_hollow_pass_runs_no_block_and_returns_the_right_form(rig: Any, name: str, setting: str) -> None:
    one = rig(name, setting=setting)
    plain = one()
    with executed(one.model) as ran, one.tracked(hollow=True):
        assert (one.body.active, one.body.hollow) == (True, True)
        output = one()
    assert ran == []
    assert one.places[0].captured() is None
    assert (output.shape, output.dtype) == (plain.shape, plain.dtype)
    assert (one.body.active, one.body.hollow) == (False, False)
    assert torch.equal(one(), plain)


@pytest.mark.parametrize("name", CASES)
def test_rows_of_a_batch_equal_the_same_samples_alone(rig: Any, name: str) -> None:
    one = rig(name, batch=2, setting="control" if CASES[name].control else "as is")
    both = one.reuse(one.compute(0)[0], 5, 0.2)
    one.batch = 1
    for row in range(2):
        assert distance(one.reuse(one.compute(row)[0], 5 + row, 0.2), both[row : row + 1]) < 1e-5
    assert distance(both[0], both[1]) > 0.01


def test_a_forecast_enters_the_layer(rig: Any) -> None:
    one = rig("unet-sd")
    features = [one.compute(seed)[0] for seed in range(2)]
    forecast = Forecast([(feature,) for feature in features], weights=torch.tensor([-1.0, 2.0]))
    with one.tracked(one.places[0], forecast):
        reused = one(3)
    with entering(one.model, Skip(0, 1), 2 * features[1] - features[0]):
        assert distance(reused, one(3)) < 1e-6


def test_of_several_places_the_outermost_is_reused_and_those_above_it_are_captured(rig: Any) -> None:
    one = rig("unet-sd", Skip(1, 0), Skip(0, 1), Skip(0, 0), Skip(2, 0))
    plain, (deep, _, _, deeper) = one(3), one.compute()
    reused = one.reuse(deep, 3)
    assert one.places[3].captured() is None
    for k in (1, 2):
        assert distance(one.reuse(one.places[k].captured()[0], 3, place=k), reused) < 1e-6
    one.places[0].begin(True, Forecast([(deep,)]))
    one.places[3].begin(True, Forecast([(deeper,)]))
    one.body.begin()
    assert distance(one(3), reused) < 1e-6
    one.body.begin()  # the pass was broken off: nobody called end
    one.places[0].end()
    one.places[3].end()
    one.body.begin()
    assert torch.equal(one(3), plain)
    one.places[0].release()
    assert one.places[0].captured() is None


@pytest.mark.parametrize("name", CASES)
def test_detaching_restores_the_model_exactly(rig: Any, name: str) -> None:
    model = CASES[name].build()  # no other test has touched it
    before, keys = dissect(model), list(model.state_dict())
    one = rig(name, Skip(0, 1), Skip(1, 0), model=model)
    for _ in range(2):
        one.reuse(one.compute()[0])
        assert list(model.state_dict()) == keys
        assert dissect(model) != before
        one.body.attach()  # once more changes nothing
        one.body.detach()
        assert dissect(model) == before
        one.body.attach()


def test_lists_keep_their_blocks_but_for_the_iteration_inside_a_pass(rig: Any) -> None:
    one = rig("unet-sd")
    lists = [one.model.down_blocks, one.model.up_blocks, one.model.up_blocks[-1].resnets]
    real = [list(modules._modules.values()) for modules in lists]
    assert type(one.model.up_blocks[0].resnets) is nn.ModuleList  # only lists at the boundary are swapped
    (feature,) = one.compute()
    with one.tracked(one.places[0], Forecast([(feature,)])):
        inside = [list(modules) for modules in lists]
        assert [list(modules[:]) for modules in lists] == real
        assert [len(modules) for modules in lists] == [3, 3, 3]
        assert [len(up.resnets) for up in one.model.up_blocks] == [3, 3, 3]
    assert inside[2] == real[2][1:]
    assert not [yielded for yielded in inside[0] + inside[1] if yielded in real[0] + real[1]]
    with pytest.raises(RuntimeError):
        one.reuse(feature[:, :3])
    assert [list(modules) for modules in lists] == real


def test_a_deep_copy_is_independent(rig: Any) -> None:
    one = rig("unet-sd", model=CASES["unet-sd"].build())
    plain, (feature,) = one(), one.compute()
    twin = copy.deepcopy(one)
    with torch.no_grad():
        twin.model.mid_block.resnets[0].conv2.weight.zero_()
    assert distance(twin.compute()[0], feature) > 1e-3
    with executed(twin.model) as ran, executed(one.model) as others:
        assert distance(twin.reuse(feature), plain) < 1e-6
        with twin.tracked(twin.places[0], Forecast([(feature,)])):
            assert torch.equal(one(), plain)
    assert (ran, len(others)) == (RUNS[Skip(0, 1)], WHOLE)
    twin.body.detach()
    assert [type(module) for module in twin.model.modules()] == [type(module) for module in built("unet-sd").modules()]
    with executed(one.model) as ran:
        one.reuse(feature)
    assert ran == RUNS[Skip(0, 1)]


@pytest.mark.parametrize("path", ["up_blocks.2.attentions.0", "down_blocks.0.resnets.0", "up_blocks.2", "mid_block"])
def test_refreshing_takes_notice_of_replaced_modules(rig: Any, path: str) -> None:
    model, (parent, _, child) = CASES["unet-sd"].build(), path.rpartition(".")
    owner, old = model.get_submodule(parent), model.get_submodule(path)
    new, before = settle(copy.deepcopy(old), seed=9), dissect(model)
    one = rig("unet-sd", model=model)
    original = one()
    owner._modules[child] = new
    one.body.refresh()
    plain = one()
    with one.tracked():
        assert torch.equal(one(), plain)
    assert distance(one.reuse(one.places[0].captured()[0]), plain) < 1e-6
    assert distance(plain, original) > 1e-3
    owner._modules[child] = old
    one.body.refresh()
    one.body.detach()
    one.body.refresh()  # does not attach what is not
    assert dissect(model) == before


def grafted(change: Callable[[Any], None]) -> Callable[[], Any]:
    def build() -> Any:
        model = copy.deepcopy(built("ddpm"))
        change(model)
        return model

    return build


def decoder() -> Any:
    return diffusers.AutoencoderKL(block_out_channels=(32,)).decoder


REFUSED = {
    "no UNet": (lambda: nn.Linear(1, 1), "it has no conv_in, mid_block, down_blocks, up_blocks"),
    "decoder": (decoder, "it has no down_blocks"),
    "no skips": (
        grafted(lambda model: setattr(model, "up_blocks", decoder().up_blocks)),
        "UpDecoderBlock2D in up_blocks takes hidden_states, temb first, not hidden_states, res_hidden_states_tuple",
    ),
    "uneven": (
        grafted(lambda model: model.up_blocks[0].attentions.pop(0)),
        "AttnUpBlock2D in up_blocks consists of 1 attentions, 2 resnets, 1 upsamplers",
    ),
    "Karras": (
        unet("UNet2DConditionModel", "KDownBlock2D", "KUpBlock2D", mid_block_type=None, attention_head_dim=8),
        "its way down gives 4 of them and its way up takes 2",
    ),
    "two ways": (
        unet("UNet2DModel", "SkipDownBlock2D", "SkipUpBlock2D"),
        "SkipDownBlock2D in down_blocks consists of 1 resnets, 1 resnet_down, 1 downsamplers, 1 skip_conv",
    ),
}


@pytest.mark.parametrize(("build", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_model_of_another_structure_is_refused_with_a_reason(build: Callable[[], Any], reason: str) -> None:
    model = build()
    with pytest.raises(
        UnsupportedModelError, match=f"^{type(model).__name__} .*: {reason}. Allowed: conv_in, and down"
    ):
        UNetBody(model)


@pytest.mark.parametrize("site", [Skip(3, 0), Skip(-1, 0), Skip(0, 3), Skip(0, -1)], ids=str)
def test_a_layer_that_does_not_exist_is_refused(site: Skip) -> None:
    body = UNetBody(built("unet-sd"))
    with pytest.raises(ValueError, match=r"Allowed: layer 0 to 2 in level 0, 0 to 2 in level 1, 0 to 2 in level 2, bo"):
        body.place(site)
    assert body.places == []
