"""Banks of condition tokens on stock Flux and QwenImage transformers (C1 to C4)."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from condition_models import CONDITION, EVERYTHING, FAMILIES, IMAGE, REFERENCE, Family, far, text
from diffusers.models.attention_dispatch import dispatch_attention_fn

from cachedit import UnsupportedModelError
from cachedit.conditions import ConditionedNetwork, KVBank
from cachedit.conditions import passes as passes_module
from cachedit.conditions.layouts import FluxLayout, QwenLayout
from zoo.packed_models import TOKENS, build_chroma, build_flux2, flux2_inputs

EXACT = 1e-13  # of float64 through five layers


@pytest.fixture(params=FAMILIES.values(), ids=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def network(family: Family) -> Iterator[ConditionedNetwork]:
    with ConditionedNetwork(family.model()).attached() as network:
        yield network


def plain(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The stock model; positions of all tokens are its own there."""
    with torch.no_grad():
        return model(**{k: v for k, v in inputs.items() if k != "rows"}, return_dict=False)[0]


def test_without_a_pass_the_model_is_what_it_was_and_a_pass_over_everything_is_bit_equal(family: Family) -> None:
    model = family.model()
    inputs = family.inputs(family.tokens(TOKENS + CONDITION), text(), 0.7, EVERYTHING)
    stock, before = plain(model, inputs), {k: v.processor for k, v in model.named_modules() if hasattr(v, "processor")}
    network = ConditionedNetwork(model)
    with network.attached():
        assert torch.equal(plain(model, inputs), stock)
        found, bank = network.record(IMAGE, **inputs)
    assert torch.equal(found, stock)
    assert {k: v.processor for k, v in model.named_modules() if hasattr(v, "processor")} == before
    assert bank.layers[0][0].shape == (1, TOKENS, 2, 16)
    assert bank.nbytes == len(before) * 2 * TOKENS * 32 * 8  # keys and values of width 32 in float64


def test_c1_foreground_over_a_recorded_background_is_the_whole_image(
    family: Family, network: ConditionedNetwork
) -> None:
    """The image's own K/V: a pass over some of its rows predicts what a pass over all does for them."""
    x, foreground = family.tokens(TOKENS), torch.tensor([5, 6, 9, 10])
    background = torch.tensor([row for row in range(TOKENS) if row not in foreground.tolist()])
    whole, bank = network.record(background, **family.inputs(x, text(), 0.7, IMAGE))
    part = family.inputs(x[:, foreground], text(), 0.7, foreground)
    assert far(network.attend(bank, **part), whole[:, foreground]) < EXACT
    assert far(network.attend(bank, bias=1.0, **part), whole[:, foreground]) > 0.01
    other = family.inputs(x[:, foreground], text(101), 0.7, foreground)
    assert far(network.attend(bank, **other), whole[:, foreground]) > 0.01


def test_a_bias_on_the_bank_is_that_many_copies_of_it(family: Family, network: ConditionedNetwork) -> None:
    """exp(s + log 2) = 2 exp(s): two equal banks without a bias are one with log 2."""
    x, foreground, background = family.tokens(TOKENS), torch.arange(8), torch.arange(8, TOKENS)
    _, bank = network.record(background, **family.inputs(x, text(), 0.7, IMAGE))
    part = family.inputs(x[:, foreground], text(), 0.7, foreground)
    twice = network.attend([bank, bank], **part)
    assert far(network.attend(bank, bias=math.log(2), **part), twice) < EXACT


def test_padding_of_the_text_stays_hidden_beside_a_bank() -> None:
    family = FAMILIES["qwenimage"]
    x, foreground, background = family.tokens(TOKENS), torch.arange(8), torch.arange(8, TOKENS)
    mask = torch.tensor([[True, True, True, True, False, False]])
    words, garbage = text(), text()
    garbage[:, 4:] = 7.0
    with ConditionedNetwork(family.model()).attached() as network:
        whole, bank = network.record(background, **family.inputs(x, words, 0.7, IMAGE), encoder_hidden_states_mask=mask)
        for bias in (0.0, 0.5):
            of = [
                network.attend(
                    bank, bias=bias, encoder_hidden_states_mask=mask,
                    **family.inputs(x[:, foreground], given, 0.7, foreground),
                )
                for given in (words, garbage)
            ]  # fmt: skip
            assert far(of[1], of[0]) < EXACT
            assert (far(of[0], whole[:, foreground]) < EXACT) == (bias == 0)


def test_c2_a_prefill_is_the_joint_pass_in_which_the_condition_sees_only_itself(
    family: Family, network: ConditionedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, condition = family.tokens(TOKENS), family.tokens(CONDITION, seed=9)
    bank = network.prefill(**family.inputs(condition, text(), 0.6, REFERENCE))
    ours = network.attend(bank, **family.inputs(x, text(), 0.6, IMAGE))
    # the oracle: text and image see everything, the condition only itself
    size = text().shape[1] + TOKENS + CONDITION
    mask = torch.ones(size, size, dtype=torch.bool)
    mask[-CONDITION:, :-CONDITION] = False
    joint = family.inputs(torch.cat([x, condition], 1), text(), 0.6, EVERYTHING)

    def masked(q: Any, k: Any, v: Any, **kwargs: Any) -> torch.Tensor:
        return dispatch_attention_fn(q, k, v, **{**kwargs, "attn_mask": mask})

    monkeypatch.setattr(f"{type(network.model).__module__}.dispatch_attention_fn", masked)
    assert far(ours, plain(network.model, joint)[:, :TOKENS]) < EXACT


def test_c2_a_prefill_depends_on_the_time_but_on_no_text(family: Family, network: ConditionedNetwork) -> None:
    condition = family.tokens(CONDITION)
    bank = network.prefill(**family.inputs(condition, text(), 0.0, REFERENCE))
    assert not bank.changes
    network.prefill(into=bank, **family.inputs(condition, text(200), 0.0, REFERENCE))
    assert len(bank.changes) == len(bank.layers)
    assert bank.drift == 0.0
    network.prefill(into=bank, **family.inputs(condition, text(), 0.6, REFERENCE))
    assert bank.drift > 0.01


def test_several_conditions_are_several_banks_in_any_order(family: Family, network: ConditionedNetwork) -> None:
    banks = [
        network.prefill(**family.inputs(family.tokens(3, seed), text(), 0.0, REFERENCE[rows]))
        for seed, rows in ((1, slice(0, 3)), (2, slice(3, 6)))
    ]
    inputs = family.inputs(family.tokens(TOKENS), text(), 0.6, IMAGE)
    assert far(network.attend(banks, **inputs), network.attend(banks[::-1], **inputs)) < EXACT


def test_c3_a_reference_that_sees_everything_drifts_with_time_and_with_the_latents(
    family: Family, network: ConditionedNetwork
) -> None:
    x, reference = family.tokens(TOKENS), family.tokens(CONDITION, seed=9)

    def recorded(latents: torch.Tensor, t: float, into: KVBank | None = None) -> tuple[torch.Tensor, KVBank]:
        inputs = family.inputs(torch.cat([latents, reference], 1), text(), t, EVERYTHING)
        return network.record(REFERENCE, into=into, **inputs)

    whole, bank = recorded(x, 0.9)
    # on the pass it was recorded in, it is exact
    assert far(network.attend(bank, **family.inputs(x, text(), 0.9, IMAGE)), whole[:, :TOKENS]) < EXACT
    first = bank.layers[0][0]
    recorded(x + 0.3 * family.tokens(TOKENS, seed=3), 0.9, bank)
    assert bank.drift > 0.001
    assert torch.equal(bank.layers[0][0], first)  # the first layer has not seen the latents yet
    recorded(x, 0.3, bank)
    assert not torch.equal(bank.layers[0][0], first)


def test_the_grid_of_an_image_is_known_beside_its_references() -> None:
    image, reference = (torch.cartesian_prod(*map(torch.arange, sizes)) for sizes in ((1, 2, 3), (1, 5, 4)))
    reference[:, 0] = 1
    assert FluxLayout().grid({"img_ids": torch.cat([image, reference]).float()}) == (2, 3)
    assert QwenLayout().grid({"img_shapes": [[(1, 2, 3), (1, 5, 4)]]}) == (2, 3)


def test_the_drift_of_a_bank_is_the_largest_relative_change_of_a_layer() -> None:
    bank, ones = KVBank(), torch.ones(1, 4, 1, 1)
    for layer, size in ((0, 1.0), (1, 1.0), (0, 1.25), (1, 0.5)):
        bank.write(layer, size * ones, ones)
    assert bank.drift == 0.5


def test_c4_the_cache_that_flux2_brings_along_keeps_the_same_promise() -> None:
    """Extracting and reading agree on the same input, once the processors that know how are set."""
    from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor, Flux2KVParallelSelfAttnProcessor

    model: Any = build_flux2().double()
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())
    for block in model.single_transformer_blocks:
        block.attn.set_processor(Flux2KVParallelSelfAttnProcessor())
    inputs = {k: v.double() for k, v in flux2_inputs(0, 1).items()}
    inputs |= {"timestep": torch.tensor([0.5]).double(), "return_dict": False}
    reference = FAMILIES["flux"].tokens(CONDITION)
    ids = torch.cat([torch.full((CONDITION, 4), 10.0).double(), inputs["img_ids"]])
    both = {**inputs, "hidden_states": torch.cat([reference, inputs["hidden_states"]], 1), "img_ids": ids}
    with torch.no_grad():
        whole, kept = model(**both, kv_cache_mode="extract", num_ref_tokens=CONDITION)
        part = model(**inputs, kv_cache=kept, kv_cache_mode="cached")[0]
    assert far(part, whole[:, -TOKENS:]) < EXACT


def test_one_bank_serves_a_batch_and_each_sample_is_what_it_is_alone(
    family: Family, network: ConditionedNetwork
) -> None:
    bank = network.prefill(**family.inputs(family.tokens(CONDITION), text(), 0.0, REFERENCE))
    x, words = family.tokens(TOKENS, batch=2), text(batch=2)
    both = network.attend(bank, **family.inputs(x, words, 0.6, IMAGE))
    first = network.attend(bank, **family.inputs(x[:1], words[:1], 0.6, IMAGE))
    assert far(both[:1], first) < EXACT
    assert far(both[1:], both[:1]) > 0.01


def test_fused_projections_change_nothing() -> None:
    family = FAMILIES["flux"]
    inputs = family.inputs(family.tokens(TOKENS), text(), 0.6, IMAGE)
    model = family.model()
    for module in model.modules():
        if hasattr(module, "fuse_projections"):
            module.fuse_projections()
    with ConditionedNetwork(model).attached() as fused, ConditionedNetwork(family.model()).attached() as plainly:
        assert far(fused.record(IMAGE, **inputs)[0], plainly.record(IMAGE, **inputs)[0]) < EXACT


def test_a_bank_in_half_the_bytes_is_read_as_the_pass_needs_it(family: Family, network: ConditionedNetwork) -> None:
    inputs = family.inputs(family.tokens(CONDITION), text(), 0.0, REFERENCE)
    wide = network.prefill(**inputs)
    narrow = network.prefill(into=KVBank(dtype=torch.float32), **inputs)
    assert 2 * narrow.nbytes == wide.nbytes
    step = family.inputs(family.tokens(TOKENS), text(), 0.6, IMAGE)
    ours = network.attend(narrow, **step)
    assert ours.dtype == torch.float64
    assert 0 < far(ours, network.attend(wide, **step)) < 1e-5


def test_an_int8_bank_has_a_scale_per_token_and_head() -> None:
    """Of 1, -0.5 and 0.25 a step is 1 / 127; -0.5 is -63.5 steps, which rounds to the even -64."""
    k = torch.tensor([[[[1.0, -0.5, 0.25, 0.0]], [[0.0, 0.0, 0.0, 0.0]], [[-254.0, 2.0, 0.0, 0.0]]]])  # [1, 3, 1, 4]
    bank = KVBank(dtype=torch.int8)
    bank.write(0, k, 2 * k)
    kept = bank.layers[0]
    assert kept.k[0, :, 0].tolist() == [[127, -64, 32, 0], [0, 0, 0, 0], [-127, 1, 0, 0]]
    assert torch.equal(kept.v, kept.k)
    found, doubled = bank.read(0, k)
    torch.testing.assert_close(found[0, 0, 0] * 127, torch.tensor([127.0, -64.0, 32.0, 0.0]))
    assert found[0, 2, 0].tolist() == [-254.0, 2.0, 0.0, 0.0]
    torch.testing.assert_close(doubled, 2 * found)
    assert bank.nbytes == 2 * 3 * (4 + 4)  # four codes and a scale of four bytes, for keys and for values
    bank.write(0, k, k)
    assert bank.drift == 0.0


def test_a_bank_in_eight_bits_is_close_and_an_eighth_of_float64(family: Family, network: ConditionedNetwork) -> None:
    inputs = family.inputs(family.tokens(CONDITION), text(), 0.0, REFERENCE)
    wide, step = network.prefill(**inputs), family.inputs(family.tokens(TOKENS), text(), 0.6, IMAGE)
    exact = network.attend(wide, **step)
    for dtype, bytes_of_16, allowed in ((torch.int8, 16 + 4, 0.01), (torch.float8_e4m3fn, 16, 0.05)):
        bank = network.prefill(into=KVBank(dtype=dtype), **inputs)
        assert bank.nbytes * 8 * 16 == wide.nbytes * bytes_of_16
        assert 0 < far(network.attend(bank, **step), exact) < allowed


def test_what_does_not_fit_is_refused_and_a_failed_pass_leaves_no_half_bank(
    family: Family, network: ConditionedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = family.inputs(family.tokens(CONDITION), text(), 0.0, REFERENCE)
    step = family.inputs(family.tokens(TOKENS, batch=3), text(batch=3), 0.6, IMAGE)
    bank = network.prefill(label=("edge", 1.0), **inputs)
    with pytest.raises(ValueError, match=r"recorded for \('edge', 1.0\).*needs one for \('depth', 1.0\)"):
        network.attend(bank, labels=[("depth", 1.0)], **step)
    two = network.prefill(**family.inputs(family.tokens(CONDITION, batch=2), text(batch=2), 0.0, REFERENCE))
    with pytest.raises(ValueError, match="2 samples in a batch of 3"):
        network.attend(two, **step)
    with pytest.raises(ValueError, match="without keys of layer 0"):
        network.attend(KVBank(), **step)
    monkeypatch.setattr(passes_module, "attend", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        network.prefill(into=bank, **inputs)
    assert bank.layers == {}
    with pytest.raises(UnsupportedModelError, match=r"Chroma.*Allowed: FluxTransformer2DModel"):
        ConditionedNetwork(build_chroma())


def test_a_pass_inside_a_pass_is_refused_and_a_copy_has_passes_of_its_own(
    family: Family, network: ConditionedNetwork
) -> None:
    inputs = family.inputs(family.tokens(CONDITION), text(), 0.0, REFERENCE)
    with network.current.during(passes_module.Pass()), pytest.raises(RuntimeError, match="one at a time"):
        network.prefill(**inputs)
    assert copy.deepcopy(network).current is not network.current
