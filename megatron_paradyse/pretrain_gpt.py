"""Trains a GPT through megatron.training.pretrain, with all of Megatron's flags.

torchrun ... -m megatron_paradyse.pretrain_gpt <Megatron flags> --paradyse
"""

from __future__ import annotations

from megatron_paradyse.train.plugin import install


def main() -> None:
    install()
    from megatron_paradyse.train.gpt import pretrain

    pretrain()


if __name__ == "__main__":
    main()
