"""`python -m autorl_hpc ...`: the same program as `autorl-hpc ...`; queued jobs call it this way."""

from autorl_hpc.entry import main

if __name__ == "__main__":
    main()
