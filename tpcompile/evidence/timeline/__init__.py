"""What each rank did, in order -> where the ranks parted and which of them left the common program: pure.

stream   what one rank did: events, oldest first
expect   events so far -> what comes next if the program goes on as before
align    streams -> the parting: where the ranks went, what was due, which rank left and why it is that one
"""
