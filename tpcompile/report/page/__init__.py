"""A run -> one HTML file that needs no network, and a trace for Perfetto.

evidence.py   what a page is made of: verdict, digests, items, what each rank did
gather.py     a folder -> the evidence that is in it
of_run.py     run directory -> that
of_logs.py    TORCH_TRACE files -> that
view.py       that -> what the page shows
shown.py      what the page shows, as data
listing.py    the items of two ranks -> rows side by side
excerpt.py    a line of source -> the lines around it
html.py       what the page shows -> HTML
perfetto.py   what each rank did -> a trace
tlparse.py    TORCH_TRACE files -> the pages of tlparse, which ours links
"""
