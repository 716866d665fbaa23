"""The probe and text auto: what a model bears is told by its logits, and auto keeps what is known to be right.

Two models are made by hand that compute the same: FIRST counts one, SECOND two, any other token nothing, and the logits
of FIRST and SECOND are C and K times the sum over the length of the sequence. One reads the sum off the ids. In the
other all rows first count for themselves, and a token takes the mean of their counts: there the rows of the prompt
carry the answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from language_models import MASK, BlockCausal, Stacked, causal_llama, eurobert, llama, model, prompts
from language_models import LLaDABlock as Block
from test_cli import refusal
from torch import nn

import cachedit
from cachedit import Profile, ProfileError, UnsupportedModelError
from cachedit.cli import main
from cachedit.samples import sample_path
from cachedit.samples.ciphers import draw_ciphers
from cachedit.samples.text_accuracy import exact_match, write
from cachedit.strategies.block_exact import BlockExact
from cachedit.strategies.dkv_cache import DkvCache
from cachedit.strategies.fast_dllm import FastDLLM
from cachedit.strategies.no_cache import NoCache
from cachedit.text import TextRun
from cachedit.text.fingerprint import fingerprint
from cachedit.text.masks import block_length_of
from cachedit.text.probe import ARRAYS, Probe, probe

FIRST, SECOND = 90, 91
P, G = 24, 8
S = P + G
C, K = 1.0, 40.0  # FIRST alone in 32 tokens makes 40 / 32, more than 1; the mean of stale counts may be less
OPTIONS: dict[str, Any] = {"gen_length": G, "block_length": G}


def counting(carried: bool) -> nn.Module:
    """Channel 0: what an id counts; channel 1: the count that rows make for themselves; channel 2: the result."""
    lm: Any = Stacked([Block(8, 1), Block(8, 1)], dim=8).double().eval()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.zero_()
        lm.embedding.weight[FIRST, 0], lm.embedding.weight[SECOND, 0] = 1, 2
        lm.embedding.weight[:, 3] = 1
        for block, (source, result) in zip(lm.blocks, ((0, 1), (1 if carried else 0, 2)), strict=True):
            block.attn_norm = block.ff_norm = nn.Identity()
            block.v_proj.weight[0, source] = 1  # with no queries and keys every token gets the mean of all values
            block.attn_out.weight[result, 0] = 1
        lm.head.weight[FIRST, 3], lm.head.weight[SECOND, 2] = C, K
    return lm


def question(rows: int = 1, seed: int = 1) -> torch.Tensor:
    return prompts(rows, P, seed) % FIRST


def counts(decided: int, variant: str, interval: int) -> list[int]:
    """What the rows hold after so many steps, one token decided at each: the sum when they were computed."""
    refreshed = decided - decided % interval
    looked = [0 if variant in ("prefill", "pd") else refreshed] * P
    if variant == "prefill":
        looked += [decided] * G
    else:  # a token is computed at the step after the one that decides it, or at the refresh behind that
        looked += [max(at + 1, refreshed) for at in range(decided)] + [decided] * (G - decided)
    return [total(step) for step in looked]


def total(decided: int) -> int:
    """What so many decided tokens count: the first one is FIRST, the others are SECOND."""
    return max(0, 2 * decided - 1)


def expected(variant: str, interval: int) -> tuple[float, float]:
    """Agreement and divergence over the steps at which something is read from the cache."""
    same, nats, compared = 0, 0.0, 0
    for decided in range(1, G):
        if variant == "decode" and decided % interval == 0:
            continue
        fresh, stale = torch.zeros(2, 97, dtype=torch.float64)
        fresh[FIRST] = stale[FIRST] = C
        fresh[SECOND] = K * total(decided) / S
        stale[SECOND] = K * sum(counts(decided, variant, interval)) / S / S
        fresh[MASK] = stale[MASK] = -1e9
        open_tokens = G - decided
        compared += open_tokens
        same += open_tokens * int(fresh.argmax() == stale.argmax())
        nats += open_tokens * float((fresh.softmax(0) * (fresh.log_softmax(0) - stale.log_softmax(0))).sum())
    return same / compared, nats / compared


@pytest.fixture(scope="module")
def carried() -> Probe:
    return probe(counting(carried=True), question(), **OPTIONS)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder of profiles, empty."""
    monkeypatch.setenv("CACHEDIT_HOME", str(tmp_path))
    (tmp_path / "profiles").mkdir()
    return tmp_path / "profiles"


def ran(lm: nn.Module) -> TextRun:
    run: TextRun = cachedit.last_run(lm)
    return run


class TestCacheability:
    def test_a_prompt_that_ignores_the_answer_bears_everything(self) -> None:
        found = probe(counting(carried=False), question(2), **OPTIONS)
        assert len(found.trials) == 12
        for trial in found.trials:
            assert trial.agreement == 1
            assert trial.divergence < 1e-12
            assert trial.passes
        # 32 tokens at first, then the masks and the one just decided; "prefill" and both Fast-dLLMs compute 8 a step
        assert found.recommended == DkvCache("decode", interval=8)
        assert {trial.strategy: trial.token_ratio for trial in found.trials}[found.recommended] == G * S / (S + 35)

    @pytest.mark.parametrize("variant", ["prefill", "decode", "pd"])
    def test_a_prompt_that_carries_the_answer_fails_by_as_much_as_it_must(self, carried: Probe, variant: str) -> None:
        trials = [trial for trial in carried.trials if getattr(trial.strategy, "variant", None) == variant]
        assert len(trials) == (1 if variant == "prefill" else 4)
        for trial in trials:
            assert isinstance(trial.strategy, DkvCache)
            agreement, divergence = expected(variant, trial.strategy.interval)
            assert trial.agreement == pytest.approx(agreement, abs=1e-12)
            assert trial.divergence == pytest.approx(divergence, rel=1e-9)
            assert not trial.passes
        # of 7 + 6 + ... + 1 open tokens those with 1 or 2 decided differ: 8 fresh rows of 32 are too few for SECOND
        if variant == "prefill":
            assert trials[0].agreement == 15 / 28

    def test_then_nothing_is_recommended(self, carried: Probe) -> None:
        assert carried.recommended == NoCache()

    def test_what_is_computed_is_counted(self, carried: Probe) -> None:
        ratios = {trial.strategy: trial.token_ratio for trial in carried.trials}
        assert ratios[NoCache()] == 1
        assert ratios[DkvCache("prefill")] == G * S / (S + (G - 1) * G)
        assert ratios[FastDLLM("dual")] == G * S / (S + (G - 1) * G)

    def test_both_compute_the_same_without_a_cache(self) -> None:
        answers = [cachedit.generate(counting(c), question(), "no-cache", **OPTIONS)[0, P:] for c in (True, False)]
        assert answers[0].tolist() == answers[1].tolist()
        assert sorted(answers[0].tolist()) == [FIRST] + [SECOND] * (G - 1)

    def test_padding_and_shifted_logits_change_nothing_for_the_worse(self) -> None:
        lm, ids = counting(carried=False), question(2)
        seen = torch.ones_like(ids)
        seen[1, :5] = 0
        assert all(trial.agreement == 1 for trial in probe(lm, ids, attention_mask=seen, **OPTIONS).trials)
        shifted = probe(model("dream"), prompts(2, P), shift=1, gen_length=8, steps=4)
        assert {trial.strategy: trial.agreement for trial in shifted.trials}[NoCache()] == 1

    def test_wrapped_or_not_is_the_same(self, carried: Probe) -> None:
        lm = cachedit.wrap(counting(carried=True), "dkv-cache", interval=1000, block_length=G)
        assert probe(lm, question(), **OPTIONS).to_dict() == carried.to_dict()

    def test_progress_is_told(self) -> None:
        told: list[tuple[int, int]] = []
        probe(counting(True), question(2), progress=lambda done, of, _: told.append((done, of)), steps=4, **OPTIONS)
        assert told == [(4, 16), (8, 16), (12, 16), (16, 16)]


class TestAttention:
    @pytest.mark.parametrize("length", [2, 7, 16, 32, 64])
    def test_blocks_are_found(self, length: int) -> None:
        assert block_length_of(BlockCausal(llama(), length).eval()) == length

    @pytest.mark.parametrize("make", [llama, eurobert])
    def test_full_attention_is_found(self, make: Callable[[], nn.Module]) -> None:
        assert block_length_of(make()) is None

    def test_from_left_to_right_is_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match="left to right"):
            block_length_of(causal_llama())

    def test_a_window_is_not_taken_for_blocks(self) -> None:
        class Window(BlockCausal):
            def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
                order = torch.arange(input_ids.shape[1])
                near = (order[:, None] - order[None]).abs() < self.block_length
                return self.lm(input_ids=input_ids, attention_mask=near[None, None], **kwargs)

        with pytest.raises(UnsupportedModelError, match=r"neither|do not see each other in blocks"):
            block_length_of(Window(llama(num_hidden_layers=1), 6).eval())

    def test_the_exact_cache_is_tried_where_it_is_exact_and_nothing_else(self) -> None:
        found = probe(BlockCausal(llama(), 8).eval(), prompts(2, 10), gen_length=24)
        assert (found.attention, found.block_length) == ("block", 8)
        assert {trial.strategy for trial in found.trials} == {BlockExact(), NoCache()}
        exact = next(trial for trial in found.trials if trial.strategy == BlockExact())
        assert exact.agreement == 1
        assert exact.divergence < 1e-12
        assert found.recommended == BlockExact()


class TestProfile:
    def test_it_is_found_by_the_weights(self, home: Path) -> None:
        lm = counting(carried=False)
        found = probe(lm, question(), **OPTIONS)
        found.to_profile("counting", "a command").save(home / "counting.json")
        stored = Profile.load(home / "counting.json")
        assert (stored.strategy, stored.command) == ("dkv_cache", "a command")
        assert stored.defaults == {"variant": "decode", "interval": 8, "window": 4}
        assert stored.arrays["agreement"][str(NoCache())] == [1.0]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cachedit.generate(lm, question(), **OPTIONS)
        assert ran(lm).strategy == str(found.recommended)
        other = counting(carried=True)  # of the same shape
        with pytest.warns(UserWarning, match="cachedit probe MODEL"):
            cachedit.generate(other, question(), **OPTIONS)
        assert ran(other).strategy == "NoCache()"

    def test_half_precision_does_not_change_who_a_model_is_and_training_does(self) -> None:
        lm = llama(torch.float32)
        before = fingerprint(lm)
        assert fingerprint(llama(torch.bfloat16)) == before
        with torch.no_grad():
            next(lm.parameters()).add_(1)
        assert fingerprint(lm)["weights"] != before["weights"]
        assert fingerprint(lm.to("meta"))["weights"] is None

    def test_one_that_is_given_must_be_of_the_model_and_of_a_probe(self, home: Path) -> None:
        lm, other = counting(carried=False), counting(carried=True)
        profile = probe(lm, question(), **OPTIONS).to_profile("mine")
        cachedit.generate(lm, question(), "auto", profile=profile, **OPTIONS)
        assert ran(lm).strategy == str(DkvCache("decode", interval=8))
        with pytest.raises(ProfileError, match=r"mine was made for another model: weights.*cachedit probe"):
            cachedit.generate(other, question(), "auto", profile=profile, **OPTIONS)
        with pytest.raises(ProfileError, match=r"holds magnitude_ratio.*cachedit probe"):
            cachedit.wrap(other, "auto", profile=Profile.from_ratios([1.0, 0.9]))
        with pytest.raises(TypeError, match="reads no profile"):
            cachedit.generate(lm, question(), "fast-dllm", profile=profile, **OPTIONS)

    @pytest.mark.parametrize(
        ("strategy", "defaults", "said"),
        [
            ("later_cache", {}, "does not know"),
            ("fast_dllm", {"cache": "triple"}, "does not know"),
            ("fast_dllm", {"size": 3}, "does not know"),
            ("taylor_seer", {}, "no strategy for text"),
        ],
    )
    def test_one_that_recommends_nonsense_is_refused(self, strategy: str, defaults: dict[str, Any], said: str) -> None:
        lm = counting(carried=False)
        prints = fingerprint(lm)
        profile = Profile(
            {array: {"NoCache()": [1.0]} for array in ARRAYS},
            axes={array: ["value"] for array in ARRAYS},
            strategy=strategy,
            model={"class": prints.pop("class"), "fingerprint": prints, "names": []},
            defaults=defaults,
        )
        with pytest.raises(ProfileError, match=said):
            cachedit.wrap(lm, "auto", profile=profile)
        assert cachedit.generate(lm, question(), "no-cache", **OPTIONS).shape == (1, S)


class TestAuto:
    def test_blocks_are_kept_exactly_in_the_length_of_the_model(self, home: Path) -> None:
        lm, ids = BlockCausal(llama(), 8).eval(), prompts(2, 10)
        plain = cachedit.generate(lm, ids, "no-cache", gen_length=24, attention="block", block_length=8)
        assert torch.equal(cachedit.generate(lm, ids, gen_length=24), plain)
        assert ran(lm).strategy == "BlockExact()"
        cachedit.wrap(lm, "auto")
        assert torch.equal(cachedit.generate(lm, ids, gen_length=24), plain)
        with pytest.raises(ValueError, match="block_length=32; allowed: 8"):
            cachedit.generate(lm, ids, "auto", gen_length=24, block_length=32)

    def test_a_model_is_asked_once_who_sees_whom(self) -> None:
        lm, ids = BlockCausal(llama(), 8).eval(), prompts(2, 10)
        cachedit.generate(lm, ids, gen_length=24)
        before = lm.tokens
        cachedit.generate(lm, ids, gen_length=24)
        assert lm.tokens - before == ran(lm).tokens_computed

    def test_a_wrapped_model_tells_its_block_length(self) -> None:
        lm = cachedit.wrap(llama(), "fast-dllm", block_length=8)
        cachedit.generate(lm, prompts(1, 10), gen_length=24)
        assert ran(lm).strip() == "■▪▪▪▪▪▪▪" * 3
        cachedit.generate(lm, prompts(1, 10), gen_length=24, block_length=12)
        assert ran(lm).strip() == "■▪▪▪▪▪▪▪▪▪▪▪" * 2

    def test_blocks_of_unknown_length_are_refused_in_loops_that_are_not_ours(self) -> None:
        lm, ids = llama(), torch.cat([prompts(1, 10), torch.full((1, 16), MASK)], 1)
        cachedit.wrap(lm, "auto", attention="block")
        with torch.no_grad(), pytest.raises(UnsupportedModelError, match="Pass block_length= to wrap"):
            lm(input_ids=ids)

    def test_it_has_no_targets_for_text(self) -> None:
        with pytest.raises(TypeError, match="TextAuto has no option 'target_speedup'"):
            cachedit.wrap(llama(), "auto", target_speedup=2.0)
        with pytest.raises(TypeError, match="TextAuto has no option 'max_nfe'"):
            cachedit.wrap(llama(), cachedit.Auto(max_nfe=3))  # type: ignore[operator]
        with pytest.warns(UserWarning, match="cachedit probe"):
            cachedit.wrap(llama(), cachedit.Auto())  # type: ignore[operator]

    def test_what_is_no_language_model_is_refused_as_ever(self) -> None:
        with pytest.raises(UnsupportedModelError, match="no attention that a text cache knows"):
            cachedit.generate(nn.Linear(2, 2), question())
        with pytest.raises(UnsupportedModelError, match="language model"):
            cachedit.generate(object(), question())

    def test_a_pipeline_with_other_blocks_is_refused_in_the_call(self) -> None:
        from test_text_pipeline import CALL, pipeline

        pipe = pipeline(block_length=16)
        plain = pipe(**CALL, input_ids=prompts(1, 21)).sequences
        cachedit.wrap(pipe, "auto")
        assert torch.equal(pipe(**CALL, input_ids=prompts(1, 21)).sequences, plain)
        assert ran(pipe).strategy == "BlockExact()"
        with pytest.raises(ValueError, match="blocks of 32 tokens"):
            pipe(**{**CALL, "block_length": 32}, input_ids=prompts(1, 21))


class TestCommand:
    def test_what_it_stores_is_what_auto_uses(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        words = [sys.executable, "-m", "cachedit", "probe", "--sample", "text", "--num-prompts", "1", "--json"]
        environment = {**os.environ, "CACHEDIT_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*words, "--gen-length", "16"], capture_output=True, encoding="utf-8", env=environment, check=True
        )
        found = json.loads(done.stdout)
        assert found["file"] == str(tmp_path / "profiles" / "text-text.json")
        assert (found["attention"], found["gen_length"], found["block_length"]) == ("full", 16, 16)
        best = found["recommended"]
        assert (best["strategy"], best["options"]["variant"]) == ("dkv_cache", "decode")  # of one block
        monkeypatch.setenv("CACHEDIT_HOME", str(tmp_path))
        from transformers import AutoModelForMaskedLM

        lm = AutoModelForMaskedLM.from_pretrained(sample_path("text"))
        cachedit.generate(lm, prompts(1, 10) % 30, gen_length=16)
        assert ran(lm).strategy == str(DkvCache(**best["options"]))

    def test_auto_on_the_sample_is_twice_as_fast_and_as_often_right(self, home: Path) -> None:
        from transformers import AutoModelForMaskedLM, AutoTokenizer

        lm = AutoModelForMaskedLM.from_pretrained(sample_path("text")).eval()
        tokenizer = AutoTokenizer.from_pretrained(sample_path("text"))
        ciphers = draw_ciphers(24, torch.Generator().manual_seed(7000), held=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a profile of it is shipped
            right = {name: exact_match(write(lm, tokenizer, ciphers, name), ciphers) for name in ("no-cache", "auto")}
        assert right["auto"] == right["no-cache"] == 1
        ratio = ran(lm).token_ratio
        assert ratio is not None
        assert ratio > 4

    def test_refusals(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert "cannot load language model" in refusal(capsys, "probe", str(home))
        assert "does not exist" in refusal(capsys, "probe", "--sample", "text", "-o", str(home / "no" / "p.json"))
        Profile.from_ratios([1.0, 0.9]).save(home / "text-text.json")
        assert "holds magnitude_ratio" in refusal(capsys, "probe", "--sample", "text")

    def test_what_it_prints(self, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ["probe", "--sample", "text", "--prompt", "a=f; one", "a=f; and two", "--gen-length", "8"]
        assert main([*words, "--steps", "2", "-o", str(home / "mine.json")]) == 0
        printed = capsys.readouterr().out
        assert "attention    full" in printed
        assert f'profile="{home / "mine.json"}"' in printed
        assert Profile.load(home / "mine.json").provenance["prompts"] == 2
