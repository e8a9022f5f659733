"""Shared by the tests: tiny random models made on the spot, and a way to run the program as a user does."""
import os
import subprocess
import sys

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: what several GPUs alone can show; skipped where there are none")


ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)

import tiny  # noqa: E402
from model import load_policy  # noqa: E402


def make_model(folder, *, tied=True, extra_vocab=0, pad_is_eos=False, second_stop=None, seed=0, layers=2, hidden=32):
    """A random Qwen2 of a few thousand parameters with the tiny tokenizer, saved as a Hugging Face folder."""
    tokenizer = tiny.make_tokenizer()
    if pad_is_eos:
        tokenizer.pad_token = tokenizer.eos_token
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=len(tokenizer) + extra_vocab, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=tied,
        initializer_range=0.3, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id))
    if second_stop is not None:
        model.generation_config.eos_token_id = [second_stop]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def make_policy(tmp_path):
    """make_policy(**of make_model, lora_rank=, ...) -> Policy of a fresh random model."""
    def make(lora_rank=0, **kwargs):
        return load_policy(make_model(tmp_path / f"model{len(os.listdir(tmp_path))}", **kwargs), lora_rank=lora_rank, device="cpu")
    return make


def run(*args, timeout=300, check=True, cwd=ROOT, env=None):
    """Run `python <args>` in the repository as a user would. Returns the finished process, output as text."""
    result = subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True, text=True, timeout=timeout,
                            env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL)
    if check:
        assert result.returncode == 0, result.stdout + result.stderr
    return result


def refused(*args, **kwargs):
    """Run a command that must fail as bad input does: exit code 2, one line, no traceback. Returns that line."""
    result = run(*args, check=False, **kwargs)
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    return lines[0]
