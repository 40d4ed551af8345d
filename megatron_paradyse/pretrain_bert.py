"""Trains a BERT on masked tokens of whole documents, with all of Megatron's flags.

torchrun ... -m megatron_paradyse.pretrain_bert <Megatron flags> --paradyse
"""

from __future__ import annotations

from megatron_paradyse.train.plugin import install


def main() -> None:
    install(model="bert")
    from megatron_paradyse.train.gpt import pretrain

    pretrain()


if __name__ == "__main__":
    main()
