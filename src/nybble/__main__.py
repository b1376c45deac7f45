"""`python -m nybble` is `nybble`."""

from nybble.cli import main

main()
