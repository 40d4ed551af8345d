"""What megatron_start.py puts round Megatron's functions, called without Megatron's own."""

from __future__ import annotations

import argparse

import pytest
import torch

from megatron_paradyse import cpu_platform, megatron_start


@pytest.mark.parametrize("shared", [True, False])
def test_norms_of_sequences_that_ranks_share_are_marked_for_the_sum_of_their_gradients(shared):
    """Without the mark each rank would go on with the gradient of its own tokens."""
    configs = []

    def new(cls, config, *args, **kwargs):
        configs.append((config.sequence_parallel, args, kwargs))
        return torch.nn.LayerNorm(4)

    config = argparse.Namespace(sequence_parallel=shared)
    module = megatron_start._norm_with_sequence_parallel(new)(object, config, 4, eps=1e-5)
    assert configs == [(False, (4,), {"eps": 1e-5})] and config.sequence_parallel is shared
    marks = [getattr(parameter, "sequence_parallel", False) for parameter in module.parameters()]
    assert marks == [shared] * 2


def test_megatrons_arguments_have_their_own_values_again_after_an_error():
    args = argparse.Namespace(seq_length=8, lr=1)
    with pytest.raises(KeyError), megatron_start.other_values(args, seq_length=2):
        assert vars(args) == {"seq_length": 2, "lr": 1}
        raise KeyError
    assert vars(args) == {"seq_length": 8, "lr": 1}


def test_what_can_be_built_is_megatrons(monkeypatch):
    args = argparse.Namespace(vocab_size=1, tokenizer_type="NullTokenizer", tokenizer_model=None)
    build = megatron_start._in_one_line(lambda args, **options: (args, options))
    assert build(args, trains=True) == (args, {"trains": True})
    opened, compiled = [], []
    megatron_start._opens_log(opened.append, "wandb")(args)
    monkeypatch.setattr(megatron_start.importlib.util, "find_spec", lambda name: None)
    compile_helpers = lambda: compiled.append(True)  # noqa: E731
    megatron_start._compile_in_a_checkout(compile_helpers)()
    assert opened == [args] and compiled == [True]


def test_other_ranks_than_the_first_say_nothing(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    megatron_start.say_once("of another rank")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("has_gpu", [True, False])
def test_megatron_is_made_ready_for_this_machine(has_gpu, monkeypatch):
    made = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(megatron_start, "install", lambda: made.append("GPU"))
    monkeypatch.setattr(cpu_platform, "install", lambda: made.append("CPU"))
    assert megatron_start.make_ready() is not has_gpu
    assert made == ["GPU" if has_gpu else "CPU"]
