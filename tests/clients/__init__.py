"""Real frameworks, used as their users use them: healthy runs are quiet, and faults in the client's own code are found.

`scripts/clients.sh` makes an environment with the frameworks and runs all of it; the ordinary suite leaves it out. Each
folder has `program.py`, a client that trains or generates on a few gloo ranks and is told on its command line which
fault to play, and `cases.py`, what is right for each fault: as data, and chosen from public reports before it was run.

- `case`: a client and its faults; `watched`: the two routes, around the client's own loop
- `launch`: one run of a client; `judge`: what it left -> found, and whether rank, cause and line are right
- `table`: rows of all runs -> text and JSON
"""
