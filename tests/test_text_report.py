"""Text strategies compared on a language model: what is measured, and the report about it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cachedit.cli import main
from cachedit.evaluate import language as loading
from cachedit.evaluate.answer import Answer
from cachedit.evaluate.configuration import Configuration, parse_configuration
from cachedit.evaluate.experiment import Cancelled
from cachedit.evaluate.language import LanguageModel, is_language_model, load_language_model
from cachedit.evaluate.text_comparison import TextComparison
from cachedit.evaluate.text_experiment import TextExperiment, text_strategies
from cachedit.evaluate.text_markdown import render_markdown
from cachedit.evaluate.text_page import chart, render
from cachedit.evaluate.text_report import measure_text
from cachedit.evaluate.text_sample import score
from cachedit.evaluate.text_table import share, told
from cachedit.samples import prompts, sample_path
from cachedit.samples.text_model import build_model, build_tokenizer
from cachedit.strategies.auto import Auto
from cachedit.strategies.dkv_cache import DkvCache
from cachedit.strategy import FeatureStrategy
from cachedit.text import TextRun, TextStep, probe
from cachedit.video.strategy import VideoStrategy

PROMPT = "a=f; abcdef"  # 12 tokens with <bos> and <answer>
CALL = {"gen_length": 8, "block_length": 4}
DUAL = parse_configuration("fast-dllm:cache=dual,label=dual")
DECODE = parse_configuration("dkv-cache:interval=1,label=always")


@pytest.fixture(scope="module")
def language() -> LanguageModel:
    """The architecture of the sample with random weights."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    return LanguageModel(build_model(tokenizer).eval(), tokenizer, "random")


def run_of(computed: list[int], total: int) -> TextRun:
    steps = [TextStep(i, count, total, 1, count == total, 1.0) for i, count in enumerate(computed)]
    return TextRun("FastDLLM()", 1, 4, len(computed), steps, 1000, "finished")


def answer_of(text: str, seconds: float, computed: list[int], **values: Any) -> Answer:
    return Answer("p", 0, [seconds], [seconds], [*map(ord, text)], text, run=run_of(computed, 8), **values)


def by_hand() -> TextComparison:
    """Two prompts; the cache computes half of the tokens, and gets two of four letters wrong on the second."""
    bare = [answer_of(text, 2.0, [8] * 4, score=1.0) for text in ("abcd", "a<&d")]
    cached = [answer_of(text, 1.0, [8, 4, 2, 2], score=score) for text, score in (("abcd", 1.0), ("a>>d", 0.0))]
    for mine, reference in zip(cached, bare, strict=True):
        mine.compare(reference)
    return TextComparison.of({"model": "m"}, ["cache"], [[*pair] for pair in zip(bare, cached, strict=True)])


class TestNumbers:
    def test_of_a_row(self) -> None:
        baseline, row = by_hand().rows
        assert (baseline.speedup, baseline.exact_match, baseline.identical, baseline.cache_bytes) == (
            1,
            None,
            None,
            None,
        )
        assert (row.latency_s, row.speedup, row.steps) == (1.0, 2.0, 4)
        assert (row.tokens_per_step, row.token_ratio, row.tokens_per_s) == (4.0, 2.0, 4.0)
        assert (row.exact_match, row.score, row.identical, row.cache_bytes) == (0.75, 0.5, 1, 1000)
        assert row.strip == "■▪▪▪"
        assert row.note == ""

    def test_the_prompt_that_changed_most_comes_first(self) -> None:
        assert by_hand().worst_first() == [1, 0]

    def test_notes_say_what_numbers_hide(self) -> None:
        bare, same = answer_of("ab", 1.0, [8, 8]), answer_of("ab", 2.0, [8, 8])
        same.compare(bare)
        row = TextComparison.of({}, ["cache"], [[bare, same]]).cached[0]
        assert row.note == "saved nothing: every step computed all tokens; slower than the baseline: 0.50x"
        same.run, same.latencies = run_of([8, 4], 8), [0.5]
        assert row.note == "every answer equals the baseline's"

    def test_a_share_is_whole_only_if_it_is_all(self) -> None:
        assert [share(value) for value in (None, 1.0, 0.99999, 0.5, 0.0)] == ["-", "100 %", "99.9 %", "50.0 %", "0.0 %"]

    def test_an_answer_in_words(self) -> None:
        (right, _), (_, wrong) = (row.answers for row in by_hand().rows)
        assert told(right) == "score 1"
        assert told(wrong) == "score 0, 50.0 % of the baseline's tokens"

    def test_answers_survive_being_kept(self) -> None:
        answer = by_hand().cached[0].answers[1]
        assert Answer.from_state(json.loads(json.dumps(answer.to_state()))) == answer


class TestExperiment:
    def test_tokens_of_each_strategy(self, language: LanguageModel) -> None:
        comparison = TextExperiment(language, [DUAL, DECODE], [PROMPT], call_options=CALL).run()
        baseline, dual, always = comparison.rows
        assert [step.computed for step in baseline.answers[0].run.steps] == [20] * 8
        assert [step.computed for step in dual.answers[0].run.steps] == [20, 4, 4, 4] * 2
        assert dual.token_ratio == pytest.approx(160 / 64)
        assert always.exact_match == 1  # everything is computed at every step
        assert always.note.startswith("saved nothing")
        assert [row.steps for row in comparison.rows] == [8, 8, 8]
        assert len(baseline.answers[0].tokens) == 8
        assert comparison.conditions["denoiser"] == "EuroBertForMaskedLM"

    def test_prompts_seeds_and_repeats(self, language: LanguageModel) -> None:
        asked = [PROMPT, "a=d; b"]
        experiment = TextExperiment(
            language, [DUAL], asked, seeds=(3, 4), repeats=2, call_options={**CALL, "temperature": 5.0}
        )
        assert experiment.expected_calls == 2 * 2 * 4
        rows = experiment.run().rows
        assert [(answer.prompt, answer.seed) for answer in rows[0].answers] == [
            (asked[0], 3),
            (asked[0], 4),
            (asked[1], 4),
            (asked[1], 5),
        ]
        assert all(len(answer.latencies) == 2 for row in rows for answer in row.answers)
        first, second = (answer.tokens for answer in rows[0].answers[:2])
        assert first != second

    def test_options_of_a_configuration_are_its_own(self, language: LanguageModel) -> None:
        fewer = parse_configuration("fast-dllm:steps=4")
        rows = TextExperiment(language, [fewer], [PROMPT], call_options=CALL).run().rows
        assert [row.steps for row in rows] == [8, 4]

    def test_the_scorer_judges_texts(self, language: LanguageModel) -> None:
        seen = []

        def scorer(prompt: str, text: str) -> float:
            seen.append((prompt, text))
            return 0.25

        rows = TextExperiment(language, [DUAL], [PROMPT], call_options=CALL, scorer=scorer).run().rows
        assert [row.score for row in rows] == [0.25, 0.25]
        assert seen == [(PROMPT, row.answers[0].text) for row in rows]

    @pytest.mark.parametrize(
        ("configurations", "asked", "options", "message"),
        [
            ([DUAL], [], {}, "got no prompts"),
            ([DUAL, DUAL], [PROMPT], {}, "two configurations are called dual"),
            ([Configuration("fora")], [PROMPT], {}, "fora caches no language model; allowed: .*fast_dllm"),
            ([DUAL], [PROMPT], {"seeds": ()}, r"got seeds=\[\]"),
            ([DUAL], [PROMPT], {"repeats": 0}, "got repeats=0"),
        ],
    )
    def test_what_cannot_be_compared(
        self, language: LanguageModel, configurations: Any, asked: Any, options: Any, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            TextExperiment(language, configurations, asked, **options)

    def test_strategies_for_text_are_those_of_the_registry(self) -> None:
        assert {"auto", "no_cache", "fast_dllm", "dkv_cache"} <= set(text_strategies())
        assert "mag_cache" not in text_strategies()
        # the other way round: what pictures and videos are made with knows of no text
        assert FeatureStrategy.of_kind()["auto"] is Auto
        assert set(text_strategies()) & set(FeatureStrategy.of_kind()) == {"auto"}
        assert not set(text_strategies()) & set(VideoStrategy.of_kind())

    def test_auto_is_what_a_probe_has_found(self, language: LanguageModel) -> None:
        found = probe(language.model, language.encode(PROMPT), mask_token_id=language.tokenizer.mask_token_id, **CALL)
        every = DkvCache("decode", 1)  # of a model with random weights nothing would be recommended but no cache
        profile = replace(found.to_profile("mine"), strategy=every.name, defaults=asdict(every))
        told = Configuration("auto", {"threshold": 0.0}, profile, "told")
        with pytest.warns(UserWarning, match="cachedit probe MODEL"):
            rows = TextExperiment(language, [Configuration("auto"), told], [PROMPT], call_options=CALL).run().rows
        assert [row.configuration for row in rows] == ["", "NoCache()", str(every)]
        assert [row.steps for row in rows] == [8, 8, 2]

    def test_options_are_those_of_auto_for_text(self, language: LanguageModel) -> None:
        assert parse_configuration("auto:threshold=0.9").options == {"threshold": 0.9}
        with pytest.raises(TypeError, match="TextAuto has no option 'max_nfe'"):
            TextExperiment(language, [parse_configuration("auto:max_nfe=4")], [PROMPT], call_options=CALL)
        with pytest.raises(TypeError, match=r"Auto has no option 'nonsense'"):
            parse_configuration("auto:nonsense=4")


class TestReport:
    @pytest.fixture
    def report(self, language: LanguageModel, tmp_path: Path) -> Any:
        options = {"folder": tmp_path, "call_options": CALL, "conditions": {"command": "c"}}
        return measure_text(language, [DUAL], [PROMPT, "a=d; b"], **options)

    def test_files(self, report: Any, language: LanguageModel, tmp_path: Path) -> None:
        assert report.write() == tmp_path / "report.html"
        assert {file.name for file in tmp_path.iterdir()} == {"report.html", "report.md", "report.json"}
        data = json.loads((tmp_path / "report.json").read_text())
        assert (data["format"], data["version"], data["kind"]) == ("cachedit-report", 1, "text")
        with pytest.raises(ValueError, match="finished report"):
            measure_text(language, [DUAL], [PROMPT], folder=tmp_path, call_options=CALL)

    def test_rows_have_the_keys_of_pictures(self, report: Any) -> None:
        schema = json.loads((Path(__file__).parent / "report_schema.json").read_text())
        baseline, cached = report.to_dict()["rows"]
        assert set(baseline) == set(schema["baseline"])
        assert set(cached) == set(schema["cached"])
        assert cached["psnr"] is None
        assert cached["nfe"] == cached["text"]["steps"] == 8
        assert set(cached["text"]) >= {"exact_match", "score", "tokens_per_s", "tokens_per_step", "steps"}
        assert cached["prompts"][0]["text"]["computed"] == [20, 4, 4, 4] * 2
        assert baseline["text"]["exact_match"] is None

    def test_an_interrupted_one_goes_on(self, language: LanguageModel, tmp_path: Path) -> None:
        calls = 0

        def cancelled() -> bool:
            nonlocal calls
            calls += 1
            return calls > 40  # in the second prompt: a call asks 9 times, and two calls warm up

        options: dict[str, Any] = {"folder": tmp_path, "call_options": CALL}
        asked = [PROMPT, "a=d; b", "a=r; c"]
        with pytest.raises(Cancelled):
            measure_text(language, [DUAL], asked, cancelled=cancelled, **options)
        assert not (tmp_path / "report.json").exists()
        with pytest.raises(ValueError, match="--resume"):
            measure_text(language, [DUAL], asked, **options)
        told: list[int] = []
        report = measure_text(
            language, [DUAL], asked, resume=True, progress=lambda done, total, text: told.append(done), **options
        )
        assert (told[0], told[-1]) == (2, 6)  # those of the first prompt were kept
        assert [answer.prompt for answer in report.comparison.baseline.answers] == asked
        report.write()
        assert not (tmp_path / "unfinished").exists()


class TestDocuments:
    def test_the_page_marks_what_differs_and_escapes_it(self) -> None:
        page = render(by_hand(), "a <title>")
        assert "<h1>a &lt;title&gt;</h1>" in page
        assert '<pre tabindex="0">a<mark>&gt;&gt;</mark>d</pre>' in page
        assert '<pre tabindex="0">a&lt;&amp;d</pre>' in page
        assert "<script" not in page
        assert page.index("a&lt;&amp;d") < page.index("abcd")  # the worse one first
        assert "http" not in page.replace("http-equiv", "")

    def test_a_chart_says_what_it_shows(self) -> None:
        drawn = chart([8, 4], 8, "a<b")
        assert drawn.count("<rect") == 2
        assert 'height="120.0"' in drawn
        assert 'height="60.0"' in drawn
        assert "a&lt;b: 2 steps compute 6.0 tokens each on average, of 8" in drawn

    def test_markdown_writes_answers_as_they_are(self) -> None:
        comparison = by_hand()
        comparison.cached[0].answers[1].text = "```\n# no heading"
        text = render_markdown(comparison, "title")
        assert "| cache | 1.00 s | 2.00x | 4 | 4 | 4.0 | 2.00x | 0.500 | 75.0 % | 1.0 kB |" in text
        assert "````text\n```\n# no heading\n````" in text


class TestLoading:
    def test_the_sample(self) -> None:
        language = load_language_model(str(sample_path("text")))
        assert type(language.model).__name__ == "EuroBertForMaskedLM"
        assert not language.model.training
        assert next(language.model.parameters()).dtype == torch.float32
        assert language.encode(PROMPT).shape == (1, 12)
        assert language.text(language.encode(PROMPT)[0]) == "a=f\nabcdef"
        assert language.options() == {"mask_token_id": 3, "eos_token_id": 2}

    def test_folders(self, tmp_path: Path) -> None:
        assert is_language_model(str(sample_path("text")))
        assert not is_language_model(str(sample_path("image")))
        assert not is_language_model(str(tmp_path / "missing"))
        with pytest.raises(ValueError, match="cannot load language model .*/image: .*Allowed: a folder"):
            load_language_model(str(sample_path("image")))

    @pytest.mark.parametrize(
        ("error", "kept", "is_text"),
        [
            (None, False, False),
            ("EntryNotFoundError", False, True),
            ("LocalEntryNotFoundError", True, True),
            ("LocalEntryNotFoundError", False, False),
            ("OfflineModeIsEnabled", False, False),
        ],
    )
    def test_hub_ids(self, monkeypatch: pytest.MonkeyPatch, error: str | None, kept: bool, is_text: bool) -> None:
        import huggingface_hub
        from huggingface_hub import errors

        def download(model: str, file: str) -> str:
            assert (model, file) == ("org/name", "model_index.json")
            if error is None:
                return "file"
            found = getattr(errors, error)
            raise found.__new__(found)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda model, file: file if kept else None)
        assert is_language_model("org/name") == is_text

    @pytest.mark.parametrize(
        ("config", "loader"),
        [
            ({"architectures": ["EuroBertForMaskedLM"]}, "AutoModelForMaskedLM"),
            ({"architectures": ["LlamaForCausalLM"]}, "AutoModelForCausalLM"),
            ({"architectures": ["DreamModel"], "auto_map": {"AutoModel": "a.DreamModel"}}, "AutoModel"),
            ({"auto_map": {"AutoModelForCausalLM": "a.B", "AutoModel": "a.B"}}, "AutoModelForCausalLM"),
            ({}, "AutoModelForCausalLM"),
        ],
    )
    def test_the_class_that_has_the_head(self, config: dict[str, Any], loader: str) -> None:
        assert loading._class_for(SimpleNamespace(**config)) == loader


class TestCommand:
    def test_a_report_on_the_sample(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["report", "--sample", "text", "--strategies", "fast-dllm:cache=dual", "--num-prompts", "1"]
        assert main([*words, "--call", "gen_length=16", "--json", "-o", str(tmp_path)]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["kind"] == "text"
        assert data["conditions"]["model"] == "the sample 'text' that comes with cachedit"
        assert data["conditions"]["call_options"] == {"gen_length": 16, "block_length": 16}
        assert data["rows"][1]["text"]["tokens_per_step"] == (70 + 15 * 16) / 16
        assert data["rows"][1]["text"]["score"] == 0  # sixteen tokens are not enough
        assert (tmp_path / "report.html").exists()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("--sample text --strategies fora", "fora caches no language model"),
            ("--sample text --strategies fast-dllm --guidance 2", "--guidance is of pictures"),
            ("--sample text --strategies fast-dllm:nosuch=1", "FastDLLM has no option 'nosuch'"),
            ("MODEL --strategies fast-dllm", "got no prompts for"),
            ("--sample image --strategies fora --trust-remote-code", "--trust-remote-code is of language models"),
        ],
    )
    def test_mistakes(self, words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        given = words.replace("MODEL", str(sample_path("text"))).split()
        assert main(["report", *given, "-o", str(tmp_path / "r")]) == 2
        assert message in capsys.readouterr().err

    def test_the_sample_is_judged_by_its_ciphers(self) -> None:
        asked = prompts("text")[0]
        assert score(asked, "fyyfhp") == 0.0
        assert score(asked, "fyyfhp fy ifbs gd ymj tqi gwnilj gjktwj ymjd xjj") == 1.0
        with pytest.raises(ValueError, match="the form is"):
            score("hello", "")
