"""The two edges of a model, embedding and loss head, in tiles of the sequence.

Tensors and a process group, as in strategies; megatron_paradyse.model_edges enters Megatron.
"""
