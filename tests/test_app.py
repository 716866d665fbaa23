"""What the app is made of: jobs, turns, controls, limits and markup. The page itself is in test_app_browser."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tensors_of_shape
from diffusers import CogView4Pipeline
from test_demo import profile, tiny_pipeline

import cachedit
from cachedit.cli import main
from cachedit.evaluate.configuration import Configuration
from cachedit.evaluate.loading import load_pipeline
from cachedit.strategy import FeatureStrategy, Strategy

pytest.importorskip("gradio", reason="gradio is not installed: pip install 'cachedit[app]'")

from desks import serving

from cachedit.app import markup
from cachedit.app.desk import Desk
from cachedit.app.image import Drawing, draw
from cachedit.app.interrupt import interruptible
from cachedit.app.job import Cancelled, Job, Status
from cachedit.app.options import chosen, options_of
from cachedit.app.report import Plan, _command
from cachedit.app.settings import Settings
from cachedit.app.shelf import Shelf

cachedit.strategies()  # type: ignore[operator]  # fills the registry
NAMES = sorted(name for name, cls in Strategy.registry.items() if issubclass(cls, FeatureStrategy))
LATENT = (1, 4, 16, 16)  # of the tiny pipeline


def outcome(job: Job) -> Any:
    """Run a job to its end."""
    for _ in job.updates():
        pass
    return job.result


# -- a job --------------------------------------------------------------------------------------------------------


class TestJob:
    def test_it_tells_and_returns(self) -> None:
        seen = threading.Event()

        def work(job: Job) -> int:
            job.tell("a", 1, 2)
            seen.wait(5)
            job.tell("b", 2, 2)
            return 7

        job = Job(work)
        told = []
        for status in job.updates():
            told.append(status)
            seen.set()
        assert told == [Status("a", 1, 2), Status("b", 2, 2)]
        assert (job.result, job.running) == (7, False)

    def test_what_nobody_took_is_replaced(self) -> None:
        taken, told = threading.Event(), threading.Event()

        def work(job: Job) -> None:
            job.tell("first")
            taken.wait(5)
            for k in range(1000):
                job.tell(str(k))
            told.set()

        job = Job(work)
        updates = job.updates()
        assert next(updates).text == "first"
        taken.set()
        told.wait(5)
        assert [status.text for status in updates] == ["999"]

    def test_an_error_is_raised_where_the_result_is_asked_for_and_keeps_nothing(self) -> None:
        class Large:
            pass

        held: list[weakref.ref[Large]] = []

        def work(job: Job) -> None:
            large = Large()
            held.append(weakref.ref(large))
            raise ValueError("no such thing")

        job = Job(work)
        assert list(job.updates()) == []
        gc.collect()
        assert held[0]() is None
        with pytest.raises(ValueError, match="no such thing"):
            job.result  # noqa: B018

    def test_cancelling_is_the_last_that_is_told(self) -> None:
        asked = threading.Event()

        def work(job: Job) -> None:
            job.tell("on")
            asked.wait(5)
            job.tell("still on")

        job = Job(work)
        updates = job.updates()
        assert next(updates).text == "on"
        job.cancel()
        asked.set()
        assert [status.text for status in updates] == ["Cancelling ..."]
        with pytest.raises(Cancelled):
            job.result  # noqa: B018

    def test_who_stops_asking_has_cancelled(self) -> None:
        ended = threading.Event()

        def work(job: Job) -> None:
            try:
                while True:
                    job.tell("on")
            finally:
                ended.set()

        updates = Job(work).updates()
        next(updates)
        updates.close()  # type: ignore[attr-defined]
        assert ended.wait(5)


# -- pipelines ----------------------------------------------------------------------------------------------------


@pytest.fixture
def loaded() -> list[Any]:
    """The pipelines that were loaded."""
    return []


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: list[Any]) -> Desk:
    return serving(tiny_pipeline, tmp_path / "out", loaded, monkeypatch)


def drawing(strategy: str = "fora", steps: int = 9, **options: Any) -> Drawing:
    cache = Configuration(strategy, options, profile() if strategy == "magcache" else None)
    return Drawing("m", cache, "red star", 3, steps, {"height": 32, "width": 32})


def cached_picture(desk: Desk, asked: Drawing) -> torch.Tensor:
    measured = outcome(Job(lambda job: draw(job, desk, asked)))
    picture = measured.cached[0].shots[0].pictures
    assert isinstance(picture, torch.Tensor)
    return picture


class TestDraw:
    def test_baseline_and_cache_from_the_same_noise(self, desk: Desk) -> None:
        told: list[Status] = []
        job = Job(lambda job: draw(job, desk, drawing(interval=3)))
        told = list(job.updates())
        baseline, row = job.result.rows
        assert (baseline.nfe, row.nfe, row.strip) == (9, 3, "■□□■□□■□□")
        assert row.psnr > 20
        expected = tiny_pipeline()(
            "red star", num_inference_steps=9, generator=torch.Generator().manual_seed(3), output_type="pt",
            height=32, width=32,
        ).images  # fmt: skip
        assert torch.allclose(baseline.shots[0].pictures, expected, atol=1e-6)
        assert told[-1].total == 18
        assert "■□□■□□■□□".startswith(told[-1].strip)

    def test_two_at_once_get_what_each_gets_alone(self, desk: Desk) -> None:
        asked = [drawing("fora", 9, interval=3), drawing("magcache", 10, threshold=0.3), drawing("taylorseer", 12)]
        alone = [cached_picture(desk, one) for one in asked]
        together: dict[int, torch.Tensor] = {}

        def visit(k: int) -> None:
            together[k] = cached_picture(desk, asked[k])

        threads = [threading.Thread(target=visit, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert all(torch.equal(alone[k], together[k]) for k in range(3))

    def test_cancel_ends_it_within_a_step_and_frees_what_it_held(self, desk: Desk, loaded: list[Any]) -> None:
        job, held, ran = Job(lambda job: draw(job, desk, drawing(steps=1000, interval=2))), 0, []
        for status in job.updates():
            if status.done == 3:
                held = len(tensors_of_shape(*LATENT))
                job.cancel()
                for block in loaded[0].transformer.transformer_blocks.children():
                    block.register_forward_hook(lambda *_: ran.append(1))
        with pytest.raises(Cancelled):
            job.result  # noqa: B018
        assert len(ran) <= 1  # the block that was running
        assert held > 0
        assert tensors_of_shape(*LATENT) == []
        assert type(loaded[0]) is CogView4Pipeline
        assert cached_picture(desk, drawing()).shape == (1, 3, 32, 32)
        assert len(loaded) == 1

    def test_an_impossible_option_is_told_before_the_first_step(self, desk: Desk) -> None:
        job = Job(lambda job: draw(job, desk, drawing(interval=0)))
        told = [status.text for status in job.updates()]
        with pytest.raises(ValueError, match="interval=0"):
            job.result  # noqa: B018
        assert set(told) <= {"loading the model"}


class TestInterruptible:
    def test_it_asks_before_every_block_and_leaves_nothing(self) -> None:
        pipe, ran = tiny_pipeline(), []
        for k, block in enumerate(pipe.transformer.transformer_blocks.children()):
            block.register_forward_hook(lambda *_, k=k: ran.append(k))

        def check() -> None:
            if ran:
                raise Cancelled

        with pytest.raises(Cancelled), interruptible(pipe, check):
            pipe("red star", num_inference_steps=2, height=32, width=32)
        assert ran == [0]  # the second block of the very first step did not run
        parts = (pipe.transformer, pipe.text_encoder, pipe.vae)
        assert not any(module._forward_pre_hooks for part in parts for module in part.modules())


class TestShelf:
    def test_the_one_used_longest_ago_goes(self) -> None:
        loaded: list[str] = []

        def load(model: str) -> Any:
            loaded.append(model)
            return tiny_pipeline()

        shelf = Shelf(load, 2)
        for model in "abac":
            with shelf.borrowed(model, Job(lambda job: None)):
                pass
        assert loaded == ["a", "b", "c"]
        assert shelf.models == ["a", "c"]

    def test_it_is_bare_afterwards_whatever_happened(self) -> None:
        shelf = Shelf(lambda model: tiny_pipeline(), 1)
        with pytest.raises(ValueError, match="interval"), shelf.borrowed("a", Job(lambda job: None)) as pipe:
            cachedit.wrap(cachedit.wrap(pipe, "fora"), "fora", interval=0)
        assert type(pipe) is CogView4Pipeline
        with shelf.borrowed("a", Job(lambda job: None)) as again:
            assert again is pipe

    def test_what_a_failed_run_held_is_gone_before_memory_is_given_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        held: list[weakref.ref[torch.Tensor]] = []
        alive: list[bool] = []

        def run() -> None:
            large = torch.zeros(3)
            held.append(weakref.ref(large))
            raise ValueError("out of something")

        monkeypatch.setattr("cachedit.app.shelf._release", lambda: alive.append(held[0]() is not None))
        shelf = Shelf(lambda model: tiny_pipeline(), 1)
        with pytest.raises(ValueError, match="out of"), shelf.borrowed("a", Job(lambda job: None)):
            run()
        assert alive == [False]

    def test_a_model_that_cannot_be_loaded_keeps_nobody_waiting(self) -> None:
        def load(model: str) -> Any:
            raise ValueError("no such model")

        shelf = Shelf(load, 1)
        for _ in range(2):
            with pytest.raises(ValueError, match="no such model"), shelf.borrowed("a", Job(lambda job: None)):
                pass

    def test_who_waits_is_told_so_and_may_leave(self) -> None:
        shelf = Shelf(lambda model: tiny_pipeline(), 1)

        def work(job: Job) -> None:
            with shelf.borrowed("a", job):
                pytest.fail("it is not its turn")

        waiting = Job(work)
        with shelf.borrowed("a", Job(lambda job: None)):
            updates = waiting.updates()
            assert next(updates).text == "waiting for 1 other run"
            waiting.cancel()
            assert [status.text for status in updates] == ["Cancelling ..."]
            with pytest.raises(Cancelled):
                waiting.result  # noqa: B018


# -- controls -----------------------------------------------------------------------------------------------------


class TestOptions:
    @pytest.mark.parametrize("name", NAMES)
    def test_every_option_is_explained_and_left_alone_unless_touched(self, name: str) -> None:
        cls = Strategy.registry[name]
        options = options_of(cls)
        assert [option.name for option in options if not option.text] == []
        shown = {option.name: option.control(option.default).value for option in options}
        assert chosen(cls, {}) == {}
        assert chosen(cls, shown) == {}

    @pytest.mark.parametrize(
        ("strategy", "option", "typed", "value"),
        [
            ("mag_cache", "threshold", "0.12", 0.12),
            ("mag_cache", "max_skip_steps", "4", 4),
            ("mag_cache", "inclusive", "False", False),
            ("mag_cache", "always_compute", "3, 11", (3, 11)),
            ("mean_cache", "budget", "10", 10),
            ("dbcache", "front", "2", 2),
            ("dbcache", "front", "0.3", 0.3),
            ("tea_cache", "coefficients", "flux", "flux"),
            ("auto", "target_speedup", 1.5, 1.5),
            ("fora", "interval", 5, 5),
        ],
    )
    def test_what_is_typed(self, strategy: str, option: str, typed: Any, value: Any) -> None:
        read = chosen(Strategy.registry[strategy], {option: typed})
        assert read == {option: value}
        assert type(read[option]) is type(value)
        Strategy.find(strategy, read)

    def test_no_number(self) -> None:
        with pytest.raises(ValueError, match="max_skip_steps got '1.5'; allowed: a whole number"):
            chosen(Strategy.registry["mag_cache"], {"max_skip_steps": "1.5"})

    def test_an_option_of_several_lines_and_one_of_several_names(self) -> None:
        texts = {option.name: option.text for cls in (cachedit.TeaCache, cachedit.Auto) for option in options_of(cls)}
        assert texts["coefficients"].endswith("or the change as it is.")
        assert texts["max_lpips"] == "likewise, of the metrics that were measured."


# -- limits -------------------------------------------------------------------------------------------------------


class TestSettings:
    def test_whoever_started_it_may_do_anything(self) -> None:
        settings = Settings(model="mine")
        assert settings.allowed_model(" /other/model ") == "/other/model"
        assert settings.allowed_profile("/any/file.json") == "/any/file.json"
        assert settings.allowed_profile("") is None

    @pytest.mark.parametrize("public", [{"share": True}, {"host": "0.0.0.0"}])
    def test_visitors_get_the_one_model_and_no_files(self, tmp_path: Path, public: dict[str, Any]) -> None:
        settings = Settings(model="mine", folder=tmp_path / "out", **public)
        assert settings.allowed_model("mine") == "mine"
        with pytest.raises(ValueError, match="Allowed: mine, as this app is open to others"):
            settings.allowed_model("/etc")
        assert settings.allowed_profile("flux-dev") == "flux-dev"
        assert settings.allowed_profile(str(tmp_path / "out" / "a.json")) is not None
        for path in ("/etc/passwd", "../a.json", str(tmp_path / "out" / ".." / "a.json"), "hub:org/name"):
            with pytest.raises(ValueError, match="not open to visitors"):
                settings.allowed_profile(path)

    def test_folders_lie_inside(self, desk: Desk) -> None:
        out = desk.settings.folder.resolve()
        folders = [desk.folder("a", "x"), desk.folder("a", "x"), desk.folder("../b", "x")]
        assert len(set(folders)) == 3
        assert all(folder.resolve().is_relative_to(out) and folder.is_dir() for folder in folders)
        for name in ("../x", "/x", "", ".x", "a/b"):
            with pytest.raises(ValueError, match="allowed: letters"):
                desk.folder("a", name)

    def test_one_run_at_a_time_for_a_session(self, desk: Desk) -> None:
        first = desk.begin("a", lambda job: None)
        with pytest.raises(ValueError, match="a run of yours is under way"):
            desk.begin("a", lambda job: None)
        desk.begin("b", lambda job: None)
        desk.cancel("a")
        with pytest.raises(Cancelled):
            first.check()
        desk.begin("a", lambda job: None)

    def test_code_beside_the_weights_runs_only_if_asked_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[bool] = []

        def from_pretrained(model: str, **options: Any) -> Any:
            asked.append(options["trust_remote_code"])
            raise OSError("enough")

        monkeypatch.setattr("diffusers.DiffusionPipeline.from_pretrained", from_pretrained)
        for settings in (Settings(), Settings(trust_remote_code=True)):
            with pytest.raises(ValueError, match="enough"):
                Desk(settings)._load("org/name")
        with pytest.raises(ValueError, match="enough"):
            load_pipeline("org/name")
        assert asked == [False, True, False]

    def test_without_gradio_the_command_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("cachedit.cli.app.find_spec", lambda name: None)
        assert main(["app"]) == 2
        assert "pip install 'cachedit[app]'" in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []


# -- markup -------------------------------------------------------------------------------------------------------


class TestMarkup:
    def test_steps_in_words(self) -> None:
        assert markup.strip_in_words("■■■□■□□■") == "8 steps; computed: 1 to 3, 5, 8; reused: 4, 6, 7"
        assert markup.strip_in_words("■■") == "2 steps; computed: 1, 2; reused: none"
        found = markup.strip("■□")
        assert (found.count('class="computed"'), found.count('class="reused"')) == (1, 1)

    def test_nothing_typed_becomes_markup(self) -> None:
        bad = '"><script>alert(1)</script>'
        picture = torch.zeros(3, 4, 4)
        parts = [
            markup.progress(Status(bad, 1, 2)),
            markup.message(bad),
            markup.error(bad),
            markup.comparison(picture, picture, bad),
            markup.table([bad], [[bad, bad]], bad),
            markup.facts({bad: bad}),
            markup.plot("<svg/>", bad),
            markup.framed(bad, bad),
        ]
        assert "<script" not in "".join(parts)
        assert '""' not in "".join(parts).replace('sandbox=""', "")

    def test_a_result_loads_nothing(self, desk: Desk) -> None:
        shown = markup.result(outcome(Job(lambda job: draw(job, desk, drawing(interval=3)))))
        assert not re.search(r"https?://|<script|<link|@import|url\(", shown)
        assert shown.count("data:image/png;base64,") == 3
        assert "FORA(interval=3" in shown

    def test_time_left(self) -> None:
        shown = [re.sub("<[^>]*>", " ", markup.progress(Status("x", 1, 4), left)) for left in (None, 5, 65, 3700)]
        assert [text.split("1 of 4")[1].strip() for text in shown] == [
            "",
            ", 5 s left",
            ", 1 min 5 s left",
            ", 1 h 1 min left",
        ]


def test_a_report_tells_the_command_that_makes_it() -> None:
    caches = [
        Configuration("fora", label="fora"),
        Configuration("magcache", {"threshold": 0.1}, "p.json", "magcache:threshold=0.1"),
    ]
    plan = Plan("", caches, ["a 'red' star"], [5, 6], 8, 2, {"guidance_scale": 2.0}, Path("x"))
    assert _command(plan) == (
        "cachedit report --sample image --strategies fora magcache:threshold=0.1,profile=p.json --prompt "
        "'a '\"'\"'red'\"'\"' star' --steps 8 --seed 5 --seeds 2 --repeats 2 --guidance 2.0"
    )
