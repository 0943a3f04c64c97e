"""Live detection of rank divergence: a job that diverges ends within seconds, with the cause, instead of hanging.

protocol.py         events -> actions: pure, owns the state
events.py           both, as records
asking.py           when a rank that waits asks the others, and what the answers mean
progress.py         regions and calls: the only progress that ranks can compare, all that steady state updates
hooks.py            torch's hooks -> events
entries.py          which call of compiled code begins
effects.py          actions -> what they do to the store, to threads and to the other modules
listener.py         the store's log -> events
timer.py            a clock and SIGTERM -> events
store_log.py        messages <-> keys of the job's store
published.py        ranks -> what they published, and what the ranks did that they wait for
messages.py         the records that ranks exchange
left_ranks.py       ranks that have left, with what each did last
log_entries.py      the entries of the log that all of them follow
snapshot.py         the state of this rank, from its stacks, progress and collectives
executed.py         the lines of user code that this rank executes, and what the others have left of theirs
kept.py             what a rank keeps of itself in the run directory, for when the job is gone
afterwards.py       what the ranks of a job have kept -> the verdict that they would have come to
flight.py           collectives in flight, from torch's flight recorder, and the user's lines of the main thread
blackbox.py         the stack that a process leaves when it aborts
process.py          whether a rank's process is alive
situation.py        the answers of all ranks, now and in the previous round
streams.py          the answers of all ranks -> streams that evidence.timeline aligns
parted.py           states of ranks -> where they parted: the one place that decides who left the common program
hang.py             a situation -> why the ranks do not progress: the first reason for a wait without an end, of
                    lost_ranks.py, exited_ranks.py, wrong_group.py and one_sided_compile.py over waits.py and
                    region_lines.py; who parted, where all of them were on their way, parted.py says
deadlock.py         ranks of all domains -> a ring of ranks that wait for each other
agreed_values.py    values that the program says are equal -> hashes, of device_sums.py for tensors
agreed_board.py     these hashes <-> keys of the store
agreed_comparison.py  what other ranks have there -> an event
agreement.py        their hashes on all ranks -> the first value that differs, or the call that some ranks left out
comparison.py       what ran on the ranks -> findings without a stuck rank, in split.py, variants.py and call_counts.py
called.py           what one rank called, and the difference to what it was before
loop_counters.py    the counters around a call; counter_samples.py keeps them
refused_kernels.py  custom ops, kernels, passes and backends that may not run on a shard -> a finding each
reach.py            since when the job's store is silent -> this rank's node is cut off
exception_cause.py  an exception -> the rank whose end caused it
alarms.py           what is wrong -> an alarm
checks.py           what is wrong -> a failed check
finding.py          the result of a rule of hang.py or comparison.py
describe.py         the state of a rank -> text for a log or a finding
other_domains.py    what this domain ends the job for -> the same with the ranks of all that find it
settle.py           an alarm -> verdict, report, policy
timeline.py         compiles, alarms and verdicts of this rank, with their times
sink.py             the sentinel's messages -> stderr and loguru
block_end.py        how the block ends on this rank -> what the others are told, and for what it waits
shutdown.py         how a process ends
sentinel.py         the public class: connects these modules, none of which imports it

Private names of torch are in tpcompile.torch_api.watching.
"""

from tpcompile.recording import early
from tpcompile.sentinel.sentinel import Sentinel
from tpcompile.sentinel.settle import Policy

__all__ = ["Policy", "Sentinel"]

early.begin()
