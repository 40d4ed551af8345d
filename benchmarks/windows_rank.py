"""`megatron-paradyse` as if no sliding window were narrow: rings of all keys, swapped halves."""

from megatron_paradyse.strategies import sizes

sizes.is_narrow = lambda *_: False  # before others import it

from megatron_paradyse.__main__ import main  # noqa: E402

if __name__ == "__main__":
    main()
