"""The shipped sample video model: its data, its judge, its weights and its training script."""

import itertools

import pytest
import torch
from diffusers import WanPipeline
from video_samples import random_denoiser

import cachedit
from cachedit.evaluate.loading import load_pipeline
from cachedit.samples import call_options, prompts, sample_path, train_video
from cachedit.samples.clips import (
    DIRECTIONS,
    EXAMPLE,
    LIMIT,
    SPEED,
    START,
    Subject,
    all_subjects,
    draw_clips,
    headings,
    path,
)
from cachedit.samples.track import ASPECTS, bounces, follow, sight
from cachedit.samples.train_rollout import CHUNK, ClipSource, RolloutLoss, TrainingAttention
from cachedit.samples.video_model import (
    build_autoencoder,
    build_text_encoder,
    build_tokenizer,
)

FRAMES = 84  # of a rollout: four times the longest sequence of the training


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def pipe():
    return load_pipeline(str(sample_path("video")))


def clip(subject: Subject, frames: int) -> torch.Tensor:
    """One clip without jitter, [3, frames, 32, 32]."""
    film = [[subject] * frames]
    return draw_clips(film, path(headings(film)))[0]


class TestClips:
    def test_prompts_round_trip(self):
        assert EXAMPLE.prompt == "a red star moves to the right and bounces"
        assert all(Subject.parse(subject.prompt) == subject for subject in all_subjects())
        assert Subject.parse("A red star  moves to the RIGHT and bounces.") == EXAMPLE
        assert len(set(all_subjects())) == 6 * 4 * 4

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", "the form is"),
            ("a red star moves up", "the form is"),
            ("a red house moves up and bounces", "shape='house'"),
            ("a red star moves away and bounces", "direction='away'"),
        ],
    )
    def test_parse_names_what_is_wrong(self, prompt, message):
        with pytest.raises(ValueError, match=message):
            Subject.parse(prompt)

    def test_shapes_move_at_constant_speed_and_bounce_at_the_limit(self):
        places = path(headings([[EXAMPLE] * 25]))[0]
        assert places[0].tolist() == pytest.approx(START)
        # From -0.4 the limit 0.6 is ten steps away; after 22 more of 0.1 it is at -0.6, then turns again.
        assert places[10, 0].item() == pytest.approx(LIMIT, abs=1e-5)
        assert places[22, 0].item() == pytest.approx(-LIMIT, abs=1e-5)
        assert places[24, 0].item() == pytest.approx(-LIMIT + 2 * SPEED, abs=1e-5)
        assert places[:, 1].abs().max() == 0

    def test_only_a_direction_at_right_angles_turns_the_shape(self):
        up, left = Subject("red", "star", "up"), Subject("red", "star", "to the left")
        turned = path(headings([[EXAMPLE] * 3 + [up] * 2]))[0]
        assert (turned[4] - turned[2]).tolist() == pytest.approx([0, -2 * SPEED], abs=1e-6)
        kept = path(headings([[EXAMPLE] * 3 + [left] * 2]))[0]
        assert (kept[4] - kept[2]).tolist() == pytest.approx([2 * SPEED, 0], abs=1e-6)

    def test_jitter_is_seeded_and_small(self):
        wanted = headings([[EXAMPLE]] * 8)
        places = path(wanted, torch.Generator().manual_seed(1))
        assert torch.equal(places, path(wanted, torch.Generator().manual_seed(1)))
        offsets = (places[:, 0] - torch.tensor(START)).abs()
        assert 0 < offsets.max() <= 0.15


class TestTrack:
    def test_is_right_on_drawn_clips(self):
        for subject in all_subjects()[::7]:
            drawn = clip(subject, 30)
            assert follow(drawn, subject) == dict.fromkeys(ASPECTS, 1.0)
            assert bounces(drawn, subject) == 2  # after 10 and after 22 frames

    @pytest.mark.parametrize(
        ("aspect", "other"),
        [
            ("colour", Subject("blue", "star", "to the right")),
            ("shape", Subject("red", "square", "to the right")),
            ("course", Subject("red", "star", "up")),
        ],
    )
    def test_notices_what_differs(self, aspect, other):
        assert follow(clip(EXAMPLE, 9), other) == {name: float(name != aspect) for name in ASPECTS}

    def test_notices_a_shape_that_stands_still_or_jumps(self):
        drawn = clip(EXAMPLE, 9)
        assert follow(drawn[:, :1].expand(-1, 9, -1, -1), EXAMPLE)["course"] == 0
        assert follow(drawn[:, ::3], EXAMPLE)["course"] == 0

    def test_sees_nothing_in_an_empty_frame_and_no_shape_in_noise(self):
        assert sight(torch.full((3, 32, 32), -0.88)) is None
        noise = torch.rand(3, 6, 32, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
        assert follow(noise, EXAMPLE)["shape"] == 0

    def test_refuses_another_size(self):
        with pytest.raises(ValueError, match=r"\[3, 64, 64\].*\[3, 32, 32\]"):
            sight(torch.zeros(3, 64, 64))


class TestAutoencoder:
    def test_is_exact_up_to_the_components_it_drops(self):
        model = build_autoencoder()
        frames = torch.stack([clip(subject, 9) for subject in all_subjects()[::16]])
        latents = model.encode(frames).latent_dist.mode()
        assert latents.shape == (6, 16, 9, 8, 8)
        decoded = model.decode(latents).sample
        error = (decoded - frames).square().mean() / 4
        assert -10 * error.log10() > 33  # dB
        # What it can draw, it draws again.
        again = model.decode(model.encode(decoded).latent_dist.mode()).sample
        inside = (decoded.abs() < 1).float()  # frames are clamped to [-1, 1]
        assert ((again - decoded) * inside).abs().mean() < 2e-3

    def test_every_frame_is_decoded_by_itself(self):
        model = build_autoencoder()
        latents = torch.randn(1, 16, 4, 8, 8, generator=torch.Generator().manual_seed(0)) / 4
        whole = model.decode(latents).sample
        for frame in range(4):
            torch.testing.assert_close(
                model.decode(latents[:, :, frame : frame + 1]).sample, whole[:, :, frame : frame + 1]
            )

    def test_training_reads_the_same_latents(self):
        model = build_autoencoder()
        frames = clip(EXAMPLE, 5)[None]
        scale = torch.tensor(model.config.latents_std)[:, None, None, None]
        latents = model.encode(frames).latent_dist.mode() / scale
        torch.testing.assert_close(ClipSource().encode(frames), latents, rtol=0, atol=5e-3)
        assert 0.5 < latents.std() < 2


class TestTrainingData:
    def test_sequences_hold_what_a_rolling_cache_holds(self):
        data = ClipSource().draw(64, 4, torch.Generator().manual_seed(0))
        assert data.clean.shape == data.context.shape == (64, 16, 4 * CHUNK, 8, 8)
        assert 0.3 < data.learned[:, 0].float().mean() < 0.8  # beginnings of clips
        assert data.learned[:, 2:].all()
        changed = data.changed.float()
        assert (changed.diff(dim=1) >= 0).all()  # never back to the first prompt
        assert 0.05 < changed.mean() < 0.4
        assert 0 < (data.clean - data.context).abs().mean() < 0.3

    def test_chunks_do_not_see_later_chunks_nor_foreign_prompts(self):
        torch.manual_seed(0)
        tokenizer = build_tokenizer()
        loss = RolloutLoss(tokenizer, build_text_encoder(len(tokenizer)), random_denoiser(), batch=2)
        data = loss.source.draw(2, 3, torch.Generator().manual_seed(3))
        data.changed[:] = torch.tensor([False, False, True])
        data.prompts = [(EXAMPLE.prompt, subject.prompt) for subject in all_subjects()[:2]]
        level = torch.full((2, 3), 0.5)

        def velocity() -> torch.Tensor:
            with torch.no_grad():
                return loss._velocity(data, data.clean, level, torch.Generator().manual_seed(4))

        before = velocity()
        data.clean[:, :, 2 * CHUNK :] += 1.0
        data.prompts = [(EXAMPLE.prompt, subject.prompt) for subject in all_subjects()[2:4]]
        after = velocity()
        assert torch.equal(before[:, :, : 2 * CHUNK], after[:, :, : 2 * CHUNK])
        assert not torch.equal(before[:, :, 2 * CHUNK :], after[:, :, 2 * CHUNK :])

    def test_training_attention_equals_the_stock_one(self):
        model = random_denoiser()
        inputs = (torch.randn(2, 16, 3, 8, 8), torch.tensor([100.0, 900.0]), torch.randn(2, 12, 64))
        with torch.no_grad():
            expected = model(*inputs).sample
            for attention in itertools.chain.from_iterable((block.attn1, block.attn2) for block in model.blocks):
                attention.processor = TrainingAttention()
                attention.processor.bias = torch.zeros(1, 1, 1, 1)
            torch.testing.assert_close(model(*inputs).sample, expected, rtol=1e-4, atol=1e-4)


class TestTraining:
    def test_a_step_of_training_and_the_export(self, tmp_path, capsys):
        def stage(name: str, *arguments: str) -> None:
            train_video.main([name, "--folder", str(tmp_path), "--output", str(tmp_path / "video"), *arguments])

        with pytest.raises(FileNotFoundError, match=r"train_video rollout"):
            stage("export")
        stage("rollout", "--steps", "1", "--batch", "2")
        stage("rollout", "--steps", "2", "--batch", "2")
        assert "at step 1" in capsys.readouterr().out  # resumed
        stage("export")
        clips = train_video.roll_out(train_video.load_pipeline(tmp_path / "video"), [EXAMPLE.prompt], 6)
        assert clips.shape == (1, 3, 6, 32, 32)


class TestShippedFiles:
    def test_prompts_are_subjects_of_every_shape_and_direction(self):
        subjects = [Subject.parse(prompt) for prompt in prompts("video")]
        assert len(set(subjects)) == 8
        assert {subject.direction for subject in subjects} == {*DIRECTIONS}

    def test_folder_is_small(self):
        files = [file for file in sample_path("video").rglob("*") if file.is_file()]
        assert sum(file.stat().st_size for file in files) <= 12e6

    def test_loads_as_a_stock_pipeline_in_float32(self, pipe):
        assert type(pipe) is WanPipeline
        assert {module.dtype for module in (pipe.transformer, pipe.vae, pipe.text_encoder)} == {torch.float32}
        assert 2e6 < sum(parameter.numel() for parameter in pipe.transformer.parameters()) < 6e6

    def test_tokenizer_knows_every_prompt(self, pipe):
        texts = [subject.prompt for subject in all_subjects()]
        tokens = pipe.tokenizer(texts).input_ids
        assert tokens == build_tokenizer()(texts).input_ids
        assert all(pipe.tokenizer.unk_token_id not in row and row[-1] == 1 for row in tokens)
        known = pipe.tokenizer("a red star moves up and bounces").input_ids
        assert pipe.tokenizer("A red star moves up, and bounces!").input_ids == known

    def test_shipped_autoencoder_is_the_one_set_by_hand(self, pipe):
        for name, value in build_autoencoder().state_dict().items():
            torch.testing.assert_close(pipe.vae.state_dict()[name], value.half().float(), rtol=0, atol=0)


@pytest.fixture(scope="module")
def clips(pipe):
    cachedit.wrap(pipe, "rolling-kv", preset="longlive", rope="sink_shift")
    try:
        yield train_video.roll_out(pipe, prompts("video"), FRAMES)
    finally:
        cachedit.unwrap(pipe)


class TestRollout:
    def test_shows_what_the_prompt_says_to_the_end(self, clips):
        for part in (clips[:, :, : FRAMES // 2], clips[:, :, FRAMES // 2 :]):
            shares = [follow(one, Subject.parse(prompt)) for one, prompt in zip(part, prompts("video"), strict=True)]
            means = {aspect: sum(share[aspect] for share in shares) / len(shares) for aspect in ASPECTS}
            assert all(share >= 0.9 for share in means.values()), means

    def test_bounces_as_often_as_its_speed_says(self, clips):
        # A way from edge to edge takes 12 frames.
        for one, prompt in zip(clips, prompts("video"), strict=True):
            assert bounces(one, Subject.parse(prompt)) == pytest.approx(FRAMES / 12, abs=1.5)

    def test_call_options_are_of_its_size(self, clips):
        options = call_options("video")
        assert (options["height"], options["width"]) == clips.shape[-2:]
