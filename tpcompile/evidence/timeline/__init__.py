"""One timeline per rank: what each did, in order -> where the ranks parted, and what each did there."""
