"""Which kernels a graph became, what was fused into each, what was not and why.

recorder.py          compiles of this process -> manifest; the only part that needs torch, with targets.py
targets.py           `package.module:build` -> manifest, compiled as rank 0 of a job
manifest_records.py  nodes, pairs, launches, manifests: frozen, as JSON
wrapper.py           generated code -> launches in order
manifest.py          launches and decisions -> manifest of a graph; totals
record_files.py      records of this package as JSON files
bisect.py            a program with one kind of op taken out -> what keeps kernels apart
attempts.py          compiles these programs
rewrites.py          graphs with one kind of op taken out
reasons.py           Inductor's reasons -> plain words and what would change it
why_not.py           pairs of launches that share a buffer -> why they are two
launched.py          manifest of a graph -> items in which ranks are compared
baseline.py          what a later manifest must not exceed; what has improved leaves it
diff.py              two manifests -> what differs, and the class of the change
no_gpu.py            this process sees a GPU that computes nothing
resources.py         registers and shared memory of the Triton kernels of a manifest
kinds.py             kind of a launch, its name and colour
manifest_text.py     manifests and differences -> text
plot.py              manifests -> SVG or PNG
win/                 whether a mode of torch.compile is faster than eager, and why not
__main__.py          `tpcompile fusion`
"""
