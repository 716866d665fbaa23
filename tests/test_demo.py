"""The measuring core and the page, on a tiny pipeline that takes prompts."""

import json
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, CogView4Pipeline, CogView4Transformer2DModel, FlowMatchEulerDiscreteScheduler
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import GlmConfig, GlmModel, PreTrainedTokenizerFast

import cachedit
from cachedit.evaluate.compare import Configuration, compare
from cachedit.evaluate.comparison import Comparison, Row, Shot
from cachedit.evaluate.figures import data_uri
from cachedit.evaluate.page import render
from cachedit.evaluate.pictures import difference, pictures
from cachedit.evaluate.table import duration, header, size, table_cells

PROMPTS = ["red star", "blue moon"]


def tiny_parts() -> dict:
    """Components of a text-to-image pipeline of 32x32 pixels with random weights, other than zero where it matters."""
    torch.manual_seed(0)
    words = {word: i for i, word in enumerate(["<pad>", "<bos>", "<unk>", "red", "blue", "star", "moon"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    # The empty negative prompt must have a token too.
    tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    text = GlmConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=0,
    )  # fmt: skip
    return {
        "tokenizer": PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>"),
        "text_encoder": GlmModel(text).eval(),
        "vae": AutoencoderKL(
            block_out_channels=(4, 8), latent_channels=4, norm_num_groups=2, sample_size=32,
            down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2, scaling_factor=1.0,
        ).eval(),
        "transformer": CogView4Transformer2DModel(
            patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=2,
            text_embed_dim=16, time_embed_dim=8, condition_dim=4, pos_embed_max_size=16, sample_size=16,
            rope_axes_dim=(16, 16),
        ).eval(),
        "scheduler": FlowMatchEulerDiscreteScheduler(),
    }  # fmt: skip


def tiny_pipeline(cls: type = CogView4Pipeline) -> CogView4Pipeline:
    pipe = cls(**tiny_parts())
    pipe.set_progress_bar_config(disable=True)
    return pipe


def profile() -> cachedit.Profile:
    """A table under which MagCache reuses some of 10 steps and computes others."""
    return cachedit.Profile.from_ratios([1.0] + [1 - 0.01 * i for i in range(1, 10)])


class Frames(CogView4Pipeline):
    """Returns every picture as a video of three frames."""

    def __call__(self, prompt=None, num_inference_steps=10, generator=None, **options):
        images = super().__call__(prompt, num_inference_steps=num_inference_steps, generator=generator, **options)[0]
        return SimpleNamespace(frames=np.stack([images[0], images[0] / 2, images[0] / 3])[None])


@pytest.fixture(scope="module")
def pipe():
    return tiny_pipeline()


@pytest.fixture(scope="module")
def comparison(pipe):
    every = [
        Configuration("MagCache", {"retention_ratio": 0.1}, profile()),
        Configuration(cachedit.MagCache(threshold=0.0, inclusive=False), {}, profile(), label="never"),
    ]
    return compare(pipe, every, PROMPTS, 10, seed=5, call_options={"height": 32, "width": 32})


class TestCompare:
    def test_rows(self, comparison):
        baseline, cached, never = comparison.rows
        assert [row.strategy for row in comparison.rows] == ["baseline", "MagCache", "never"]
        assert (baseline.speedup, baseline.nfe, baseline.psnr, baseline.strip) == (1, 10, None, "")
        assert cached.nfe + cached.reused == 10
        assert 0 < cached.reused < 10
        assert cached.strip.count("□") == cached.reused
        assert cached.speedup == baseline.latency_s / cached.latency_s
        assert 0 < cached.rho < 1
        assert cached.cache_bytes > 0
        assert 20 < cached.worst_psnr <= cached.psnr < math.inf
        assert 0.5 < cached.ssim < 1
        assert 0 < cached.st_lpips < 1
        assert cached.configuration.startswith("MagCache(threshold=0.06")

    def test_a_cache_that_reuses_nothing_says_so_and_changes_nothing(self, comparison):
        never = comparison.rows[2]
        assert (never.nfe, never.reused, never.rho, never.identical, never.psnr) == (10, 0, None, 2, math.inf)
        assert never.note.startswith("reused nothing: every step was computed (")
        assert "error reached the threshold" in never.note

    def test_conditions(self, comparison):
        conditions = comparison.conditions
        assert conditions["steps"] == 10
        assert conditions["sampler"] == "FlowMatchEulerDiscreteScheduler"
        assert conditions["prompts"] == PROMPTS
        assert conditions["seeds"] == [5, 6]
        assert conditions["size"] == "32x32"
        assert conditions["device"].startswith("cpu, ")
        assert conditions["threads"] == 1
        assert conditions["profiles"] == {"MagCache": "without a name", "never": "without a name"}
        assert conditions["torch"] == torch.__version__

    def test_prompts_have_their_own_noise_and_every_configuration_the_same(self, pipe, comparison):
        expected = pipe(
            PROMPTS[1], num_inference_steps=10, generator=torch.Generator().manual_seed(6), output_type="pt", height=32,
            width=32,
        ).images  # fmt: skip
        for row in (comparison.rows[0], comparison.rows[2]):
            assert torch.allclose(row.shots[1].pictures, expected.clamp(0, 1), atol=1e-6)

    def test_order_of_runs(self, pipe):
        calls = []
        every = [Configuration("magcache", profile=profile(), label="a"), Configuration("magcache", {}, profile())]
        compare(pipe, every, PROMPTS, 2, repeats=2, progress=lambda *call: calls.append(call))
        total = 2 * 3 * (1 + 2 * 2)
        # Told once when a run begins, and after each of its two steps.
        assert [done for done, _, _ in calls] == [2 * run + step for run in range(15) for step in (0, 1, 2)]
        assert {of for _, of, _ in calls} == {total}
        rounds = ["warm-up"] + ["prompt 1 of 2"] * 2 + ["prompt 2 of 2"] * 2
        names = ("baseline", "a", "magcache")
        assert [text for _, _, text in calls[::3]] == [f"{name}, {what}" for what in rounds for name in names]

    def test_repeats_are_all_measured(self, pipe):
        row = compare(pipe, [], PROMPTS, 1, repeats=3).baseline
        assert [len(shot.latencies) for shot in row.shots] == [3, 3]

    def test_pipeline_is_left_bare(self, pipe, comparison):
        assert type(pipe) is CogView4Pipeline
        with pytest.raises(cachedit.ProfileError):
            compare(
                pipe, [Configuration("magcache", profile=profile()), Configuration("magcache", label="b")], PROMPTS, 2
            )
        assert type(pipe) is CogView4Pipeline

    def test_errors_come_before_the_first_run(self, pipe):
        calls = []
        for configuration in (Configuration("nosuch"), Configuration("magcache")):
            with pytest.raises(ValueError, match="no strategy is called|needs a profile"):
                compare(pipe, [configuration], PROMPTS, 2, progress=lambda *call: calls.append(call))
        assert calls == []

    @pytest.mark.parametrize(
        ("changes", "message"),
        [({"prompts": []}, "no prompts"), ({"steps": 0}, "steps=0"), ({"repeats": 0}, "repeats=0")],
    )
    def test_impossible_requests(self, pipe, changes, message):
        with pytest.raises(ValueError, match=message):
            compare(pipe, [], **{"prompts": PROMPTS, "steps": 2, **changes})

    def test_pipeline_without_prompts(self):
        class Unprompted:
            def __call__(self, class_labels, num_inference_steps=2, generator=None): ...

        with pytest.raises(ValueError, match="Unprompted takes no prompt; allowed"):
            compare(Unprompted(), [], PROMPTS, 2)

    def test_edits_have_more_than_a_prompt(self, pipe):
        with pytest.raises(ValueError, match="kv-edit, other works on calls with an image"):
            compare(pipe, [Configuration("kv-edit"), Configuration("reference-kv", {}, None, "other")], PROMPTS, 2)

    def test_videos_are_compared_frame_by_frame(self):
        result = compare(tiny_pipeline(Frames), [Configuration("magcache", {}, profile())], ["red star"], 10)
        assert result.baseline.shots[0].pictures.shape == (3, 3, 32, 32)
        assert result.conditions["size"] == "32x32, 3 frames"
        assert 20 < result.rows[1].psnr < math.inf
        assert render(result).count('class="film"') == 3


class TestJson:
    def test_schema(self, comparison):
        data = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
        assert set(data) == {"conditions", "rows"}
        baseline, cached, never = data["rows"]
        for row in data["rows"]:
            assert {"strategy", "latency_s", "speedup", "nfe", "rho", "psnr", "ssim", "cache_bytes", "strip"} <= set(
                row
            )
            assert [shot["prompt"] for shot in row["prompts"]] == PROMPTS
        assert (baseline["speedup"], baseline["nfe"]) == (1.0, 10)
        assert [baseline[key] for key in ("rho", "psnr", "ssim", "cache_bytes", "identical")] == [None] * 5
        assert cached["identical"] is False
        assert (never["psnr"], never["identical"], never["identical_prompts"]) == (None, True, 2)
        assert "reused nothing" in never["note"]

    def test_what_is_not_finite_is_null(self):
        shots = [Shot("x", 0, [1.0], run=cachedit.Run("s"), quality={"psnr": math.nan, "ssim": math.inf})]
        row = Row.of_cache("s", shots, Row("baseline", 2.0, 1.0, 1)).to_dict()
        json.dumps(row, allow_nan=False)
        assert (row["psnr"], row["ssim"], row["prompts"][0]["psnr"]) == (None, None, None)

    def test_no_run_recorded_is_told(self):
        row = Row.of_cache("s", [Shot("x", 0, [1.0])], Row("baseline", 2.0, 1.0, 1))
        assert row.nfe is None
        assert row.note.startswith("no run was recorded")


class TestTable:
    def test_cells(self, comparison):
        names = header(comparison)
        assert names == ["strategy", "latency", "speed-up", "NFE", "rho", "cache", "PSNR", "SSIM", "st-lpips"]
        baseline, _, never = (dict(zip(names, table_cells(comparison, row), strict=True)) for row in comparison.rows)
        assert (baseline["speed-up"], baseline["NFE"], baseline["PSNR"]) == ("1.00x", "10", "-")
        assert (never["PSNR"], never["SSIM"]) == ("identical", "1.0000")

    def test_st_lpips_is_left_out_without_its_weights(self):
        result = Comparison({}, [Row("baseline", 1.0, 1.0, 4), Row("s", 0.5, 2.0, 2, quality={"psnr": 30.0})])
        assert header(result)[-1] == "SSIM"
        assert table_cells(result, result.rows[1]) == ["s", "500 ms", "2.00x", "2", "-", "-", "30.0", "-"]

    def test_units(self):
        assert [duration(s) for s in (0.0123, 1.5)] == ["12 ms", "1.50 s"]
        assert [size(n) for n in (None, 12, 81920, 2_500_000, 3e9)] == ["-", "12 B", "81.9 kB", "2.5 MB", "3.0 GB"]


class TestPage:
    def test_loads_nothing(self, comparison):
        page = render(comparison)
        assert not re.search(r"https?://|<script|<link|@import|url\(", page)
        sources = re.findall(r'src="([^"]*)"', page)
        assert len(sources) == 2 * 2 * 3
        assert all(source.startswith("data:image/png;base64,") for source in sources)

    def test_conditions_then_table_then_pictures(self, comparison):
        page = render(comparison)
        parts = [
            "<h2>Conditions",
            "FlowMatchEulerDiscreteScheduler",
            "<table>",
            "reused nothing",
            "<h2>Pictures",
            "<img",
        ]
        places = [page.index(part) for part in parts]
        assert places == sorted(places)
        assert comparison.rows[1].strip in page

    def test_worst_first(self, comparison):
        order = comparison.worst_first()
        values = [comparison.rows[1].shots[i].psnr for i in order]
        assert values == sorted(values)
        page = render(comparison)
        places = [page.index(f"<h3>{PROMPTS[i]}") for i in order]
        assert places == sorted(places)

    def test_prompts_are_escaped(self, pipe):
        page = render(compare(pipe, [Configuration("magcache", {}, profile())], ["<b>red & star"], 5))
        assert "&lt;b&gt;red &amp; star" in page
        assert "<b>" not in page


class TestPictures:
    FRAME = np.linspace(0, 1, 4 * 5 * 3, dtype=np.float32).reshape(4, 5, 3)

    def test_every_form_gives_the_same(self):
        expected = torch.from_numpy(self.FRAME).permute(2, 0, 1)[None]
        for images in (self.FRAME[None], [self.FRAME], expected, [expected[0]], expected[None]):
            assert torch.equal(pictures(SimpleNamespace(images=images)), expected)
        assert torch.equal(pictures((self.FRAME[None],)), expected)
        image = Image.fromarray((self.FRAME * 255).round().astype(np.uint8))
        assert (pictures(SimpleNamespace(frames=[[image]])) - expected).abs().max() < 0.003

    def test_grey_and_transparent(self):
        assert pictures(SimpleNamespace(images=torch.rand(1, 1, 4, 4))).shape == (1, 3, 4, 4)
        assert pictures(SimpleNamespace(images=torch.rand(1, 4, 4, 4))).shape == (1, 3, 4, 4)

    @pytest.mark.parametrize(
        "output", [SimpleNamespace(), SimpleNamespace(images=torch.rand(2, 7)), ("text",), (["a"],)]
    )
    def test_no_pictures(self, output):
        with pytest.raises(ValueError, match="allowed: images or frames"):
            pictures(output)

    def test_difference(self):
        a = torch.full((3, 2, 2), 0.5)
        assert torch.allclose(difference(a, a - 0.1, 5), a)
        assert difference(a, a - 0.4, 5).max() == 1

    @pytest.mark.parametrize(("side", "kind"), [(256, "png"), (257, "jpeg")])
    def test_large_pictures_become_jpeg(self, side, kind):
        assert data_uri(torch.rand(3, 8, side)).startswith(f"data:image/{kind};base64,")
