"""Started on one rank: the first step of a training on tokens that are learnt in part, in float64.

    compare_learnt RESULT PREFIX <Megatron flags>

Writes the loss and the norm of the gradient that plain_gpt has on all documents of PREFIX, read
without this package, with the weights that Megatron begins with; and the loss of the other tokens.
"""

import json
import sys

import numpy as np
import torch

from tests.train.compare_with_plain import model_of_flags
from tests.train.plain_gpt import plain_losses


def read(prefix: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each document its tokens, and whether each is learnt."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokens, stop = IndexedDataset(prefix), 0
    learnt, documents = np.fromfile(prefix + ".targets", dtype=np.uint8), []
    for index in range(len(tokens)):
        start, stop = stop, stop + len(tokens[index])
        text = torch.from_numpy(tokens[index].astype(np.int64))
        documents.append((text, torch.from_numpy(learnt[start:stop])))
    return documents


def main() -> None:
    result, prefix = sys.argv.pop(1), sys.argv.pop(1)
    args, model, weights = model_of_flags()
    device = next(model.parameters()).device
    shape = {"num_layers": args.num_layers, "num_heads": args.num_attention_heads}
    total, count, unlearnt = torch.zeros((), dtype=torch.float64, device=device), 0, []
    for tokens, learnt in ((x.to(device), y.to(device)) for x, y in read(prefix)):
        (losses,) = plain_losses(weights, tokens[None, :-1], tokens[None, 1:], **shape)
        total = total + losses[0][learnt[1:].bool()].sum()
        count += int(learnt[1:].sum())
        unlearnt.append(losses[0][~learnt[1:].bool()].detach())
    (total / count).backward()
    norm = sum(float(weight.grad.square().sum()) for weight in weights.values()) ** 0.5
    with open(result, "w") as file:
        loss = float(total.detach()) / count
        others = float(torch.cat(unlearnt).mean())
        json.dump({"loss": loss, "grad_norm": norm, "loss of others": others}, file)


if __name__ == "__main__":
    main()
