"""The shipped sample text model: its task, its tokenizer, its weights and its training script."""

import pytest
import torch

from cachedit.samples import call_options, prompts, sample_path, train_text
from cachedit.samples.ciphers import KEYS, Cipher, draw_ciphers, exact, held_out
from cachedit.samples.text_accuracy import exact_match, stale_agreement, write
from cachedit.samples.text_model import ANSWER_TOKENS, BLOCK_TOKENS, build_tokenizer, encode

TEXT = "attack at dawn by the old bridge before they see"
EXAMPLE = Cipher("f", TEXT)
PROMPT, ANSWER = f"a=f\n{TEXT}", "fyyfhp fy ifbs gd ymj tqi gwnilj gjktwj ymjd xjj"


def drawn(count: int, held: bool = True, seed: int = 0) -> list[Cipher]:
    return draw_ciphers(count, torch.Generator().manual_seed(seed), held)


@pytest.fixture(scope="module")
def model_and_tokenizer():
    return train_text.load(sample_path("text"))


class TestCiphers:
    def test_prompt_and_answer(self):
        assert EXAMPLE.prompt == PROMPT
        assert EXAMPLE.answer == ANSWER
        assert Cipher("n", Cipher("n", TEXT).answer).answer == TEXT  # halfway round, twice

    @pytest.mark.parametrize("text", [PROMPT, PROMPT.replace("\n", "; "), PROMPT.upper(), f"\n{PROMPT}\n"])
    def test_parse_takes_lines_and_semicolons(self, text):
        assert Cipher.parse(text) == EXAMPLE

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ("", "the form is"),
            (TEXT, "the form is"),
            (f"b=f; {TEXT}", "the form is"),
            (f"a=f; {TEXT[:-1]}!", "the form is"),
            (f"a=e; {TEXT}", "got the key 'e'; allowed: one of d, f, l, n, r, v"),
            (f"a=f; {TEXT[:-1]}", "got a text of 47 characters; allowed: 48"),
        ],
    )
    def test_parse_tells_what_is_wrong(self, prompt, message):
        with pytest.raises(ValueError, match=message):
            Cipher.parse(prompt)

    def test_drawing_is_seeded_and_keeps_the_sets_apart(self):
        known, unknown = drawn(200, held=False), drawn(200)
        assert known == drawn(200, held=False)
        assert not any(map(held_out, known))
        assert all(map(held_out, unknown))
        assert {cipher.key for cipher in known} == set(KEYS)
        assert all(len(word) > 1 for cipher in known for word in cipher.text.split())

    def test_exact_minds_every_letter(self):
        assert exact(ANSWER, EXAMPLE)
        assert exact(ANSWER + " ", EXAMPLE)
        assert not exact(ANSWER.replace("h", "i"), EXAMPLE)
        assert not exact(ANSWER.replace(" ", ""), EXAMPLE)
        assert not exact("", EXAMPLE)


class TestTokenizer:
    def test_a_token_per_character(self):
        tokenizer = build_tokenizer()
        tokens = tokenizer.convert_ids_to_tokens(tokenizer("a=f\nby x").input_ids)
        assert tokens == ["<bos>", *"a=f;by x", "<answer>"]
        assert tokenizer(PROMPT.replace("\n", "; ")).input_ids == tokenizer(PROMPT).input_ids
        assert tokenizer("a ?").input_ids[3] == tokenizer.unk_token_id

    def test_texts_come_back_as_they_were(self):
        tokenizer = build_tokenizer()
        for text in (PROMPT, ANSWER):
            assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text

    def test_lengths(self):
        tokens, prompt = encode(build_tokenizer(), drawn(2))
        assert (tokens.shape, prompt) == ((2, 102), 54)
        assert call_options("text") == {"gen_length": ANSWER_TOKENS, "block_length": BLOCK_TOKENS}

    def test_the_shipped_one_is_the_one_that_is_built(self, model_and_tokenizer):
        built, shipped = build_tokenizer(), model_and_tokenizer[1]
        for cipher in drawn(20):
            assert shipped(cipher.prompt).input_ids == built(cipher.prompt).input_ids
        assert shipped.decode(shipped(ANSWER).input_ids, skip_special_tokens=True) == ANSWER
        names = ("pad", "bos", "eos", "mask")
        assert [getattr(shipped, f"{name}_token_id") for name in names] == [0, 1, 2, 3]


class TestShippedFiles:
    def test_prompts_are_ciphers_and_half_of_them_held_out(self):
        ciphers = [Cipher.parse(prompt) for prompt in prompts("text")]
        assert len(set(ciphers)) == 8
        assert sum(map(held_out, ciphers)) == 4

    def test_weights_are_small_and_load_in_float32(self, model_and_tokenizer):
        model, tokenizer = model_and_tokenizer
        assert sum(file.stat().st_size for file in sample_path("text").rglob("*")) < 8e6
        assert type(model).__name__ == "EuroBertForMaskedLM"
        assert model.dtype == torch.float32
        assert 1e6 <= model.num_parameters() <= 4e6
        ids = [model.config.pad_token_id, model.config.bos_token_id, model.config.eos_token_id]
        assert [*ids, model.config.mask_token_id] == [0, 1, 2, 3]
        assert model.config.vocab_size == len(tokenizer)


class TestModel:
    def test_every_token_sees_every_other(self, model_and_tokenizer):
        model, tokenizer = model_and_tokenizer
        tokens, _ = encode(tokenizer, [EXAMPLE])
        other = tokens.clone()
        other[0, -1] = tokenizer.mask_token_id
        with torch.no_grad():
            states = [model.model(ids).last_hidden_state[0, 0] for ids in (tokens, other)]
        assert not torch.equal(*states)

    def test_writes_in_the_cipher(self, model_and_tokenizer):
        model, tokenizer = model_and_tokenizer
        assert write(model, tokenizer, [EXAMPLE]) == [ANSWER]
        ciphers = drawn(32, seed=1)
        assert exact_match(write(model, tokenizer, ciphers), ciphers) >= 0.9  # 0.95 or more of 256

    def test_bears_a_cached_prompt(self, model_and_tokenizer):
        model, tokenizer = model_and_tokenizer
        assert stale_agreement(model, tokenizer, drawn(48, seed=2), torch.Generator().manual_seed(0)) >= 0.99

    def test_the_agreement_notices_another_prompt(self, model_and_tokenizer, monkeypatch):
        """Frozen rows of a prompt whose tokens are masked as well are not those of the prompt."""
        from cachedit.samples import text_accuracy

        model, tokenizer = model_and_tokenizer
        freeze = text_accuracy._frozen_prompt

        def of_nothing(model, prompt, tokens):
            return freeze(model, prompt, torch.full_like(tokens, tokenizer.mask_token_id))

        monkeypatch.setattr(text_accuracy, "_frozen_prompt", of_nothing)
        assert stale_agreement(model, tokenizer, drawn(8), torch.Generator().manual_seed(0)) < 0.95


class TestTraining:
    def test_masks_are_as_a_decoder_meets_them(self):
        masks = train_text.draw_masks(2000, torch.Generator().manual_seed(0))
        assert masks.any(1).all()
        share = masks.float().mean().item()
        assert 0.4 < share < 0.6
        first, last = masks[:, :16].float().mean().item(), masks[:, -16:].float().mean().item()
        assert first < share < last

    def test_a_few_steps_and_the_way_to_a_model(self, tmp_path, capsys):
        def stage(name: str, *arguments: str) -> None:
            train_text.main([name, "--folder", str(tmp_path / "a"), "--output", str(tmp_path / "text"), *arguments])

        with pytest.raises(FileNotFoundError, match="run the stage first.*train_text train"):
            stage("export")
        stage("train", "--steps", "1", "--batch", "2")
        stage("train", "--steps", "2", "--batch", "2")
        assert "at step 1" in capsys.readouterr().out  # resumed
        stage("export")
        stage("evaluate", "--count", "2")
        assert '"ciphers": "held out", "count": 2' in capsys.readouterr().out
        model, _ = train_text.load(tmp_path / "text")
        assert model.dtype == torch.float32
