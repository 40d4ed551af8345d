"""`python -m megatron_paradyse` is the command `megatron-paradyse`."""

from megatron_paradyse.cli import main

if __name__ == "__main__":
    main()
