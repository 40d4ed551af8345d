"""With GPUs in sight, a rank asks CUDA for nothing before it has chosen its own device."""

from __future__ import annotations

import sys

from tests.train.harness import run_bounded

# Whatever needs a CUDA context goes through torch.cuda._lazy_init, from C++ too.
TRAINING = """
import sys, types
import torch
import megatron.training
from megatron.training.models.gpt import GPTModelConfig
from megatron_paradyse.settings import Settings
from megatron_paradyse.train import plugin, session

said = []
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: 8
torch.cuda.set_device = lambda device: said.append(f"device {device}")
torch.cuda._lazy_init = lambda: said.append("CUDA")
args = types.SimpleNamespace(
    paradyse=True,
    local_rank=5, world_size=1, num_layers=1, num_experts=None, window_size=None, no_rope_freq=None,
    paradyse_model="gpt", micro_batch_size=1, seq_length=64, distributed_timeout_minutes=1,
    multi_latent_attention=False, mtp_num_layers=None, kv_channels=64, params_dtype=torch.bfloat16,
    attention_dropout=0.0, attention_output_gate=False, group_query_attention=False,
    make_vocab_size_divisible_by=128, tensor_model_parallel_size=1, vocab_size=None,
)
megatron.training.get_args = lambda: args
session.Session = lambda settings: types.SimpleNamespace(settings=settings, enter=lambda _: None)
config = types.SimpleNamespace(model=GPTModelConfig.__new__(GPTModelConfig))
for policy in sys.argv[1:]:
    args.paradyse_settings = Settings(policy=policy, profile=False, sequences="fixed")
    try:
        plugin._wrap_pretrain(None)(config, None, None, None)
    except Exception:  # there is no GPU to give what is asked for
        print(*said[:2])
    said.clear()
"""


def test_a_rank_chooses_its_device_before_it_asks_cuda_for_anything(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_PARADYSE_CACHE", str(tmp_path))
    for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):  # as torchrun does
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, "-c", TRAINING, "fixed:megatron_ts", "optimal"]
    code, stdout, stderr = run_bounded(command, timeout_seconds=120)
    assert code == 0, stderr[-3000:]
    assert stdout.splitlines() == ["device 5 CUDA"] * 2, stdout
