"""Motion modules that see the newest frames alone, and those before through rings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conftest import dissect
from diffusers.models.attention_processor import AttnProcessor2_0

from cachedit import UnsupportedModelError
from cachedit.video import MotionStream
from cachedit.video.motion import Ring
from zoo.draw import Draw
from zoo.packed_models import build_flux
from zoo.unet_models import build_motion

FRAMES, SIDE, TEXT = 6, 8, 6
EXACT = 1e-12  # of float64


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture
def unet() -> Any:
    return build_motion().double().requires_grad_(False)


def clip(seed: int = 0, batch: int = 1) -> torch.Tensor:
    return Draw(seed, batch)(4, FRAMES, SIDE, SIDE).double()


def words(frames: int, batch: int = 1) -> torch.Tensor:
    """The text once per frame, as the stock model takes it."""
    return Draw(9, batch)(TEXT, 16).double().repeat_interleave(frames, 0)


def far(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


def motion_modules(unet: Any) -> list[Any]:
    return [module for module in unet.modules() if type(module).__name__ == "AnimateDiffTransformer3D"]


class Masked(AttnProcessor2_0):
    """The stock processor, in which no frame sees a later one."""

    def __call__(self, attn: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        count = x.shape[1]
        mask = torch.full((count, count), -torch.inf).double().triu(1)
        kwargs["attention_mask"] = mask.expand(x.shape[0], -1, -1).repeat_interleave(attn.heads, 0)
        kwargs.pop("encoder_hidden_states", None)
        return super().__call__(attn, x, **kwargs)


def causal(unet: Any, x: torch.Tensor, t: float) -> torch.Tensor:
    """The oracle: the stock model on the whole clip, causal in time and with group norms of single frames."""
    old = []
    for module in motion_modules(unet):
        stock = module.norm.forward
        module.norm.forward = lambda h, stock=stock: torch.stack([stock(frame) for frame in h.unbind(2)], 2)
        for block in module.transformer_blocks:
            for attn in (block.attn1, block.attn2):
                old.append((attn, attn.processor))
                attn.set_processor(Masked())
    found = unet(x, t, words(x.shape[2]), return_dict=False)[0]
    for module in motion_modules(unet):
        del module.norm.forward
    for attn, processor in old:
        attn.set_processor(processor)
    return found


def streamed(stream: MotionStream, x: torch.Tensor, t: float, step: Any = 0) -> torch.Tensor:
    """One frame after the other."""
    frames = [stream([step], frame[:, :, None], t, words(1)) for frame in x.unbind(2)]
    return torch.cat(frames, 2)


def test_frame_by_frame_is_the_whole_clip_under_a_causal_mask(unet: Any) -> None:
    x = clip()
    with MotionStream(unet, window=8, sink=2).attached() as stream:
        ours = streamed(stream, x, 500.0)
    assert far(ours, causal(unet, x, 500.0)) < EXACT
    assert far(ours, unet(x, 500.0, words(FRAMES), return_dict=False)[0]) > 0.001


def test_the_frames_of_a_call_see_each_other(unet: Any) -> None:
    """As many frames as there are in one call are the stock model, which sees all in both directions."""
    x = clip()
    with MotionStream(unet, window=8, sink=0).attached() as stream:
        assert far(stream([0], x, 500.0, words(FRAMES)), unet(x, 500.0, words(FRAMES), return_dict=False)[0]) < EXACT


def test_positions_count_from_the_oldest_frame_that_is_seen(unet: Any) -> None:
    """One layer: frame 5 sees the sink 0 and the ring 4, 5, and the stock attention is given just these three."""
    block = motion_modules(unet)[0].transformer_blocks[0]
    x = Draw(3, 5)(FRAMES, block.dim).double()  # five places
    stream = MotionStream(unet, window=3, sink=1)
    with stream.attached():
        ring = Ring()
        for frame in range(FRAMES):
            with stream._current.during([ring]):
                ours = block.attn1(block.pos_embed(x[:, frame : frame + 1]))
            ring.frames += 1
    seen = block.pos_embed(x[:, [0, 4, 5]])
    assert far(ours, block.attn1(seen)[:, 2:]) < EXACT
    assert far(ours, block.attn1(block.pos_embed(x))[:, 5:]) > 0.001


def test_steps_have_rings_of_their_own_and_samples_may_be_at_different_steps(unet: Any) -> None:
    """Two denoising steps in one batch, the second a frame behind: each is what it is alone."""
    first, second = clip(1), clip(2)
    times = torch.tensor([800.0, 300.0]).double()
    with MotionStream(unet, window=4, sink=1).attached() as stream:
        alone = streamed(stream, first, 800.0, "a"), streamed(stream, second, 300.0, "b")
        bytes_of_two = stream.nbytes
        stream.reset()
        assert stream.nbytes == 0
        found: list[list[torch.Tensor]] = [[stream([0], first[:, :, :1], 800.0, words(1))], []]
        for frame in range(1, FRAMES):
            rows = torch.cat([first[:, :, frame : frame + 1], second[:, :, frame - 1 : frame]])
            both = stream([0, 1], rows, times, words(1, batch=1).repeat(2, 1, 1))
            for part, row in zip(found, both.split(1), strict=True):
                part.append(row)
        assert stream.nbytes == bytes_of_two
    assert far(torch.cat(found[0], 2), alone[0]) < EXACT
    assert far(torch.cat(found[1], 2), alone[1][:, :, : FRAMES - 1]) < EXACT


def test_memory_does_not_grow_and_a_failed_call_can_be_made_again(unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x = clip()
    with MotionStream(unet, window=4, sink=1).attached() as stream:
        whole, sizes = streamed(stream, x, 500.0), set()
        stream.reset()
        again = []
        for index, frame in enumerate(x.unbind(2)):
            if index == 3:
                monkeypatch.setattr(unet.conv_out, "forward", lambda _: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    stream([0], frame[:, :, None], 500.0, words(1))
                monkeypatch.undo()
            again.append(stream([0], frame[:, :, None], 500.0, words(1)))
            sizes.add(stream.nbytes)
    assert torch.equal(torch.cat(again, 2), whole)
    assert len(sizes) == 1


def test_outside_of_calls_and_afterwards_the_model_is_what_it_was(unet: Any) -> None:
    x, before = clip(), dissect(unet)
    stock, keys = unet(x, 500.0, words(FRAMES), return_dict=False)[0], list(unet.state_dict())
    with MotionStream(unet, window=4, sink=1).attached() as stream:
        streamed(stream, x, 500.0)
        assert torch.equal(unet(x, 500.0, words(FRAMES), return_dict=False)[0], stock)
        assert list(unet.state_dict()) == keys
    assert torch.equal(unet(x, 500.0, words(FRAMES), return_dict=False)[0], stock)
    assert dissect(unet) == before


def test_what_cannot_be_streamed_is_refused(unet: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="FluxTransformer2DModel has 0 motion blocks"):
        MotionStream(build_flux())
    for window, sink in ((9, 0), (4, 4), (4, -1)):
        with pytest.raises(ValueError, match=f"window of {window} frames with a sink of {sink}; allowed: a window up"):
            MotionStream(unet, window=window, sink=sink)
    with MotionStream(unet, window=4, sink=1).attached() as stream:
        with pytest.raises(ValueError, match=r"got steps \[0, 0\] for 2 samples"):
            stream([0, 0], clip(batch=2)[:, :, :1], 500.0, words(1, 2))
        with stream._current.during([]), pytest.raises(RuntimeError, match="one at a time"):
            stream([0], clip()[:, :, :1], 500.0, words(1))
        with pytest.raises(ValueError, match="of 6 frames; allowed: .* up to 3 frames"):
            stream([0], clip(), 500.0, words(FRAMES))
