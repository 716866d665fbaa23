"""Metrics against numbers that can be checked by hand or come from another implementation."""

import math
from urllib.error import URLError

import pytest
import torch

from cachedit.evaluate import st_lpips as st_lpips_module
from cachedit.evaluate.lpips import FILES, build_trunk
from cachedit.evaluate.metrics import (
    MetricUnavailable,
    lpips,
    mean_psnr,
    ms_ssim,
    psnr,
    ssim,
    st_lpips,
    temporal_error,
)

METRICS = [psnr, ssim, st_lpips, lpips]


def smooth(seed: int = 0, count: int = 2, side: int = 64) -> torch.Tensor:
    """Pictures with structure: random colours on a 4x4 grid, blown up."""
    coarse = torch.rand(count, 3, 4, 4, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(coarse, side, mode="bilinear")


def noisy(pictures: torch.Tensor, strength: float) -> torch.Tensor:
    noise = torch.randn(pictures.shape, generator=torch.Generator().manual_seed(1))
    return (pictures + strength * noise).clamp(0, 1)


class TestPsnr:
    @pytest.mark.parametrize(("offset", "decibels"), [(0.1, 20.0), (0.01, 40.0), (1.0, 0.0)])
    def test_constant_offset(self, offset, decibels):
        black = torch.zeros(1, 3, 4, 4)
        assert psnr(black, black + offset).item() == pytest.approx(decibels, abs=1e-4)

    def test_one_number_per_picture(self):
        black = torch.zeros(2, 3, 4, 4)
        other = torch.stack([torch.full((3, 4, 4), 0.1), torch.full((3, 4, 4), 0.01)])
        assert psnr(black, other).tolist() == pytest.approx([20, 40], abs=1e-4)

    def test_identical_is_infinite(self):
        assert psnr(smooth(), smooth()).tolist() == [math.inf, math.inf]

    def test_mean_leaves_identical_pictures_out(self):
        assert mean_psnr([20.0, 30.0]) == 25
        assert mean_psnr([20.0, math.inf]) == 20
        assert mean_psnr([math.inf]) == math.inf


class TestMsSsim:
    def test_identical_is_one_and_noise_lowers_it(self):
        pictures = smooth(side=184)
        assert ms_ssim(pictures, pictures).tolist() == pytest.approx([1, 1])
        values = [ms_ssim(pictures, noisy(pictures, s)).mean().item() for s in (0.02, 0.1, 0.3)]
        assert values == sorted(values, reverse=True)

    def test_one_number_per_picture(self):
        pictures = smooth(side=176)
        first = torch.stack([pictures[0], noisy(pictures, 0.2)[1]])
        assert ms_ssim(pictures, first)[0].item() == pytest.approx(1)
        assert ms_ssim(pictures, first)[1].item() < 0.99

    def test_too_small(self):
        with pytest.raises(MetricUnavailable, match="175x175 pixels; allowed: 176x176 or more"):
            ms_ssim(smooth(side=175), smooth(side=175))


class TestSmallPictures:
    def test_learned_metrics_say_how_small_is_too_small(self):
        assert st_lpips(smooth(side=21), smooth(seed=1, side=21)).min() > 0
        with pytest.raises(MetricUnavailable, match="20x20 pixels; allowed: 21x21 or more"):
            st_lpips(smooth(side=20), smooth(side=20))

    @pytest.mark.parametrize(("net", "least"), [("alex", 31), ("squeeze", 17), ("vgg", 16)])
    def test_backbones(self, net, least):
        build_trunk(net)(torch.rand(1, 3, least, least))
        with pytest.raises(MetricUnavailable, match=f"allowed: {least}x{least} or more"):
            lpips(smooth(side=least - 1), smooth(side=least - 1), net=net)


class TestTemporalError:
    def test_by_hand(self):
        """Levels 0, 0.5, 0.5 against 0, 0, 0.5: the changes 0.5, 0 and 0, 0.5 differ by half each time."""
        a, b = (torch.tensor(v).reshape(3, 1, 1, 1).expand(3, 3, 2, 2) for v in ([0, 0.5, 0.5], [0, 0, 0.5]))
        assert temporal_error(a, b).tolist() == [0.5, 0.5]
        assert temporal_error(a, a).tolist() == [0, 0]

    def test_a_constant_offset_is_no_flicker(self):
        frames = smooth(count=3) / 2
        assert temporal_error(frames, frames + 0.25).max() < 1e-6

    def test_one_frame(self):
        with pytest.raises(MetricUnavailable, match="got 1 frames; allowed: two or more"):
            temporal_error(smooth(count=1), smooth(count=1))


class TestSsim:
    def test_identical_is_one(self):
        assert ssim(smooth(), smooth()).tolist() == [1, 1]

    def test_constant_pictures_follow_the_formula(self):
        """Without variance only luminance counts: (2 x y + c) / (x^2 + y^2 + c), c = 0.01^2."""
        a, b = torch.full((1, 3, 16, 16), 0.5), torch.full((1, 3, 16, 16), 0.6)
        assert ssim(a, b).item() == pytest.approx((2 * 0.3 + 1e-4) / (0.25 + 0.36 + 1e-4), abs=1e-4)

    def test_falls_with_noise(self):
        values = [ssim(smooth(), noisy(smooth(), s)).mean().item() for s in (0.02, 0.1, 0.3)]
        assert values == sorted(values, reverse=True)

    def test_too_small(self):
        with pytest.raises(MetricUnavailable, match="10x64 pixels; allowed: 11x11"):
            ssim(torch.zeros(1, 3, 10, 64), torch.zeros(1, 3, 10, 64))


class TestStLpips:
    def test_identical_is_zero(self):
        assert st_lpips(smooth(), smooth()).tolist() == [0, 0]

    def test_rises_with_noise(self):
        values = [st_lpips(smooth(), noisy(smooth(), s)).mean().item() for s in (0.02, 0.05, 0.1, 0.3)]
        assert values == sorted(values)
        assert 0 < values[0] < 0.1 < values[-1] < 1

    def test_forgives_a_shift_that_psnr_does_not(self):
        edge = (torch.arange(66)[None, None, None] % 8 < 4).float().expand(1, 3, 64, 66)
        a, b = edge[..., :64], edge[..., 1:65]
        assert psnr(a, b).item() < 10
        assert st_lpips(a, b).item() < st_lpips(a, noisy(a, 0.3)).item()

    def test_missing_package(self, monkeypatch):
        monkeypatch.setattr(st_lpips_module, "PACKAGE", "no-such-package")
        with pytest.raises(MetricUnavailable, match="pip install no-such-package"):
            st_lpips(smooth(), smooth())

    def test_missing_file(self, tmp_path):
        with pytest.raises(MetricUnavailable, match=r"cannot read its weights.*nothing\.pth"):
            st_lpips(smooth(), smooth(), weights=tmp_path / "nothing.pth")


@pytest.fixture(scope="module")
def weight_files(tmp_path_factory):
    """A seeded random backbone per network, under the names that torchvision publishes."""
    files = {}
    for net in FILES:
        generator = torch.Generator().manual_seed(0)
        state = {}
        for key, value in build_trunk(net).state_dict().items():
            weight = value.ndim > 1
            scale = (2 / value[0].numel()) ** 0.5 if weight else 0.0
            state[f"features.{key}"] = torch.randn(value.shape, generator=generator) * scale if weight else value * 0
        state["classifier.1.weight"] = torch.zeros(1)
        files[net] = tmp_path_factory.mktemp("weights") / FILES[net]
        torch.save(state, files[net])
    return files


class TestLpips:
    GOLDEN = {  # torchmetrics 1.9 with the same backbone weights, computed once
        "alex": [0.01270657405257225, 0.012107159942388535],
        "squeeze": [0.014550491236150265, 0.01630302704870701],
        "vgg": [0.02432844787836075, 0.02481064386665821],
    }

    @pytest.mark.parametrize("net", list(FILES))
    def test_equals_torchmetrics(self, net, weight_files):
        generator = torch.Generator().manual_seed(1)
        a = torch.rand(2, 3, 64, 64, generator=generator)
        b = (a + 0.1 * torch.randn(a.shape, generator=generator)).clamp(0, 1)
        assert lpips(a, b, net, weight_files[net]).tolist() == pytest.approx(self.GOLDEN[net], rel=1e-4)
        assert lpips(a, a, net, weight_files[net]).tolist() == [0, 0]

    def test_file_from_the_environment(self, monkeypatch, weight_files):
        monkeypatch.setenv("CACHEDIT_LPIPS_WEIGHTS", str(weight_files["alex"]))
        assert lpips(smooth(), noisy(smooth(), 0.1)).min() > 0

    def test_file_from_the_folder_of_torch_hub(self, monkeypatch, tmp_path, weight_files):
        monkeypatch.delenv("CACHEDIT_LPIPS_WEIGHTS", raising=False)
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
        (tmp_path / "checkpoints").mkdir()
        (tmp_path / "checkpoints" / FILES["alex"]).write_bytes(weight_files["alex"].read_bytes())
        assert lpips(smooth(), noisy(smooth(), 0.1)).min() > 0

    def test_no_weights_is_an_error_that_says_where_to_put_them(self, monkeypatch, tmp_path):
        def offline(*_: object, **__: object) -> None:
            raise URLError("no network")

        monkeypatch.delenv("CACHEDIT_LPIPS_WEIGHTS", raising=False)
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
        monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
        with pytest.raises(MetricUnavailable) as error:
            lpips(smooth(), smooth())
        for part in (FILES["alex"], str(tmp_path / "checkpoints"), "no network", "st-lpips"):
            assert part in str(error.value)

    def test_weights_of_another_backbone(self, weight_files):
        with pytest.raises(MetricUnavailable, match="does not hold the weights of LPIPS' vgg backbone"):
            lpips(smooth(), smooth(), "vgg", weight_files["alex"])

    def test_named_file_is_missing(self, tmp_path):
        with pytest.raises(MetricUnavailable, match="no such file"):
            lpips(smooth(), smooth(), weights=tmp_path / "nothing.pth")

    def test_unknown_backbone(self):
        with pytest.raises(ValueError, match="net='resnet'; allowed: alex, squeeze, vgg"):
            lpips(smooth(), smooth(), "resnet")


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("shapes", [((1, 3, 16, 16), (2, 3, 16, 16)), ((3, 16, 16),) * 2, ((1, 4, 16, 16),) * 2])
def test_shapes_that_do_not_fit(metric, shapes):
    with pytest.raises(ValueError, match=r"allowed: two tensors of one shape \[N, 3, H, W\]"):
        metric(*map(torch.zeros, shapes))
