"""`python -m pullback` is `pullback`."""

from pullback.cli import main

if __name__ == "__main__":
    main()
