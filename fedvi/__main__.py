"""`python -m fedvi` is the command `fedvi`."""

from fedvi.experiment.commands import main

if __name__ == "__main__":
    main()
