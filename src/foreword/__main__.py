"""`python -m foreword` is the `foreword` command."""

from foreword.cli.main import main

if __name__ == "__main__":
    main()
