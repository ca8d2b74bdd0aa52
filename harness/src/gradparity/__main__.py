"""`python -m gradparity`: the command line.

In: arguments. Out: an exit code.
"""

from gradparity.cli import app

if __name__ == "__main__":
    app(prog_name="gradparity")
