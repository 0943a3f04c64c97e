"""Programs that several ranks run, without torch: what rank and iteration decide, and the line at which the ranks part.

`# parts` is on that line; a program without one is healthy.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, ClassVar

log: list[object] = []


def collective(*_what: object) -> None:
    """Where the ranks would meet."""


class Optimizer:
    """Sums its weights every fourth of its own steps."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1
        if self.num_steps % 4 == 0:
            collective("weights")

    @staticmethod
    def reduced(step: int) -> None:
        collective("gradient", step)


def has_overflowed(rank: int, step: int) -> bool:
    return bool(rank == 1 and step == 6)


def scaler_skips_a_step(rank: int) -> None:
    """The later syncs come at other iterations, so the ranks part twice: the first time is the fault."""
    optimizer = Optimizer()
    for step in range(11):
        collective("loss")
        if rank == 0:
            log.append(step)
        if not has_overflowed(rank, step):  # parts
            optimizer.step()


def idle_rank_runs_a_dummy(rank: int) -> None:
    for step in range(6):
        has_work = rank != 1 or step != 4
        execute(step) if has_work else execute_dummy(step)  # parts


def execute(step: int) -> None:
    for _ in range(3):
        collective("draft", step)


def execute_dummy(step: int) -> None:
    collective("draft", step)


def decoding_ends_early(rank: int) -> None:
    for request in range(3):
        for position in range(8):
            collective(request, position)
            if position == (3 if rank == 1 and request == 2 else 6):  # parts
                break
        collective("next", request)


def batches(rank: int) -> Iterator[int]:
    for number in range(9 if rank == 1 else 12):  # noqa: UP028 parts
        yield number


def data_ends_early(rank: int) -> None:
    for batch in batches(rank):
        collective(batch)
    collective("end")


def parsed(rank: int, document: int) -> int:
    if rank == 1 and document == 5:  # parts
        raise ValueError("not a number")
    return document


def documents() -> Iterator[int]:
    for document in range(9):  # noqa: UP028
        yield document
    log.append("end")


def a_bad_record_is_skipped(rank: int) -> None:
    """Its rank reads one document more than the others for each step from then on, and its data ends first."""
    for document in documents():
        try:
            batch = parsed(rank, document)
        except ValueError:
            log.append("skipped")
            continue
        collective(batch)


def a_flag_is_set_long_before(rank: int) -> None:
    is_slow = False
    for step in range(12):
        collective("forward", step)
        if rank == 1 and step == 3:  # parts
            is_slow = True
        if step % 2:
            collective("even")
        if step == 9 and is_slow:
            collective("extra")


def save(rank: int, step: int) -> None:
    if rank == 1:  # parts
        gathered = [step]
        log.append(gathered)
        collective("weights")


def one_rank_saves_with_a_collective(rank: int) -> None:
    """At a branch that none had passed before: nothing tells which of two ranks is right."""
    for step in range(12):
        collective("forward", step)
        log.append(step)
        if step == 8:
            save(rank, step)
        log.append(-step)


def one_rank_reads_again_once(rank: int) -> None:
    """Without harm: no collective comes of it."""
    for step in range(12):
        collective("forward", step)
        if rank == 1 and step == 3:
            log.append("again")
        collective("backward", step)


def rank_0_logs(rank: int) -> None:
    for step in range(12):
        collective("forward", step)
        if rank == 0:
            log.append(step)
        collective("backward", step)


def rank_0_evaluates_now_and_then(rank: int) -> None:
    for step in range(20):
        collective("forward", step)
        if step % 5 == 4:
            if rank == 0:
                for number in range(40):
                    log.append(number)
            collective("barrier")


def experts_without_tokens(rank: int) -> None:
    for step in range(16):
        if (step * 7 + rank * 3) % 5 < 2:
            log.append("tokens")
        collective("all_to_all", step)


def same_on_all(rank: int) -> None:
    for step in range(10):
        collective(step)


def data_ends_early_where_one_rank_logs(rank: int) -> None:
    """The end follows at once on the line at which they part by habit."""
    for step in shard(rank):
        collective("gradients", step)
        if rank == 0:
            log.append(step)


def shard(rank: int) -> Iterator[int]:
    step = 0
    while step < 9 - 2 * (rank == 1):  # parts
        yield step
        step += 1


def attached(target: list[Callable[[int], None]]) -> None:
    """Under a different name, as torch's modules keep hooks where no line of the user reads them."""

    def hook(step: int) -> None:
        if step % 3 == 2:
            collective("statistics")

    target.append(hook)


def one_rank_attaches_a_hook(rank: int) -> None:
    callbacks: list[Callable[[int], None]] = []
    for step in range(7):
        if rank == 1 and step == 1:  # parts
            attached(callbacks)
        collective("forward", step)
        for call in callbacks:
            call(step)


def stages(rank: int, num_steps: int = 9) -> None:
    """A pipeline: each rank has a role, and rank 1 leaves out one sum."""
    for step in range(num_steps):
        if rank == 0:
            first_stage(step)
        else:
            last_stage(step)
        if rank == 0 or step != 6:  # parts
            collective("tied", step)


def a_last_stage_skips_a_part(rank: int) -> None:
    """It sends other parts after the one that it left out."""
    for step in range(5):
        collective("receive", step)
        for part in range(3):
            if rank == 2 and (step, part) == (4, 1):  # parts
                continue
            send(part)


class Growing:
    """A state that one rank resumes with another count; what all count then comes round at different steps."""

    def __init__(self, count: int) -> None:
        self.count, self.scale = count, 1.0

    def update(self) -> None:
        self.count += 1
        if self.count >= 8:  # parts
            self.scale *= 2
            self.count = 0


def a_state_is_resumed_otherwise(rank: int) -> None:
    state, weight = Growing(4 if rank == 1 else 1), 0.0
    for step in range(20):
        collective("gradients", step)
        weight += 1 / state.scale
        state.update()
        log.append(weight)  # agrees


PROMPTS = {1: ("a fox", "")}


def preview(rank: int) -> None:
    for prompt in PROMPTS.get(rank, ("a fox", "a bowl")):
        if not prompt:  # parts
            raise ValueError("no words")
        log.append(prompt)


def a_preview_fails_now_and_then_on_one_rank(rank: int) -> None:
    is_training = True
    for step in range(14):
        log.append(is_training)  # calls
        collective("gradients", step)
        if step % 4 == 3:
            try:
                is_training = False
                preview(rank)
                is_training = True
            except ValueError:
                log.append("failed")


def first_stage(step: int) -> None:
    for _ in range(3):
        collective("send", step)


def last_stage(step: int) -> None:
    collective("receive", step)
    if step == 6:
        log.append("frozen")


# The line that sets a value apart has `# sets`; all ranks execute the same lines.


class Packing:
    """Sizes that follow from one number, over two calls and an attribute."""

    def __init__(self) -> None:
        self.seen = 0
        self.ratio = 2

    def slots(self, tokens: int) -> int:
        return tokens * self.ratio

    def count(self, tokens: int) -> None:
        self.seen += tokens  # sets


def tokens_of(rank: int, step: int) -> int:
    return 23 if (rank, step) == (1, 7) else 32  # sets


def a_size_differs_once(rank: int) -> None:
    packing = Packing()
    for step in range(8):
        tokens = tokens_of(rank, step)
        slots = packing.slots(tokens)
        collective(slots)


def a_counter_runs_ahead(rank: int) -> None:
    """What is counted differs by turns; the sum differs from then on."""
    packing = Packing()
    for step in range(9):
        rows = 4 if rank == 1 and step in (3, 5) else 8
        packing.count(rows)
        total = packing.seen
        collective(total)


def a_setting_is_read_once(rank: int) -> None:
    width = 16 if rank == 1 else 8  # sets
    for _ in range(5):
        collective(width)


def a_line_that_runs_late_makes_a_size_differ(rank: int) -> None:
    """The first values that this line sets: those of the other line were equal each time."""
    for step in range(6):
        length = 16
        if step > 3:
            length = 16 - 8 * (rank == 1) - step % 2  # sets
        batch = [step] * length
        collective(len(batch))


def the_rank_chooses_a_width(rank: int) -> None:
    my_rank = rank
    width = (8, 16, 8)[my_rank]  # sets
    for _ in range(5):
        collective(width)


def a_block_runs_under_a_setting(rank: int) -> None:
    width = (8, 16, 8)[rank]  # sets
    for step in range(5):
        with Scope(width):
            step += 1


class Scope:
    """A setting that holds inside of a `with` block."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __enter__(self) -> None:
        collective()

    def __exit__(self, *_: object) -> None:
        pass


def a_coin_chooses_the_layer(rank: int) -> None:
    """Each rank tosses its own from step 9 on; nothing says which of two is wrong."""
    for step in range(12):
        coin = (step * step * 7 // 3 + (rank if step > 9 else 0)) % 2
        if coin:  # parts
            collective("layer")
        collective("loss")


def the_first_rank_writes_and_fails(rank: int) -> bool:
    """The other ranks leave the function at once, each time; this time the writer returns early."""
    for step in range(5):
        log.append(step)
        if not written(rank, step):
            continue
        collective("barrier")
    return True


def written(rank: int, step: int) -> bool:
    if rank != 0:
        return True
    try:
        log.append(1 // (step - 4))  # parts
    except ZeroDivisionError:
        return False
    return True


def a_width_is_used(width: int) -> None:
    for _ in range(5):
        collective(width)


class Wide:
    """A mode, which says nothing as a value."""


class Policy:
    """Doubles its sizes in one mode."""

    def __init__(self) -> None:
        self.mode: object = object()

    def size(self) -> int:
        if isinstance(self.mode, Wide):  # sets
            return 4
        return 2


def a_mode_changes_on_one_rank(rank: int) -> None:
    policy = Policy()
    for step in range(8):
        policy.mode = Wide() if rank == 1 and step > 5 else object()
        size = policy.size()
        collective(size)


def equal_by_chance_at_first(rank: int) -> None:
    for step in range(6):
        length = 5 + rank * min(step, 2)
        padded = length + rank if step == 5 else 8  # sets
        collective(padded)


REDUCE_OPS = ("max", "min", 0.5)


def an_op_changes_once(values: Sequence[object], rank: int) -> None:
    for step in range(8):
        op = values[rank if step == 6 else 0]  # sets
        collective(op)


def layers_are_sampled_anew(rank: int) -> None:
    """Two of twelve are trained; the ranks agree on which in the first two rounds."""
    trained = ((3, 4), (8, 11), ((2, 6), (1, 7))[rank])
    for sampled in trained:
        for layer in range(12):
            if layer in sampled:  # parts
                collective(layer)


def heads_in_another_order(rank: int) -> None:
    heads = {"quality": 7, "safety": 6} if rank == 0 else {"safety": 6, "quality": 7}
    for name, size in heads.items():  # sets
        collective(name, size)


class Depths:
    """The layers that a rank takes for its own, as one with a wrong size of its group does."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    @property
    def stage(self) -> int:
        return self.rank

    def first(self) -> int:
        return self.stage * 4  # sets

    def layers(self) -> range:
        return range(self.first(), self.first() + 4)


class Scaled:
    def __init__(self, number: int) -> None:
        self.scale = 1.0 / (number + 1)


def depths_differ_all_the_time(rank: int) -> None:
    depths = Depths(rank)
    blocks = [Scaled(number) for number in depths.layers()]
    for step in range(3):
        collective(step, blocks)


def noisy(rank: int, step: int) -> int:
    return 3 if rank == 1 and step >= 4 else 2  # sets


def a_rate_is_halved_on_one_rank(rank: int) -> None:
    rate, num_bad = 8, 0
    for step in range(9):
        loss = noisy(rank, step)
        if loss > 2:
            num_bad += 1
        if num_bad == 2:
            rate = 4
        collective(rate)


class Stopping:
    """Ends when it was worse too often."""

    def __init__(self) -> None:
        self.num_bad = 0

    def is_over(self, loss: float, limit: float) -> bool:
        if loss > limit:
            self.num_bad += 1
        return self.num_bad > 2


def one_rank_stops_early(rank: int) -> None:
    stopping = Stopping()
    for step in range(8):
        loss = 1 / (3 + step) if rank == 0 else 0.35
        collective(step)
        if stopping.is_over(loss, 0.3):  # parts
            break


def one_rank_has_a_setting_more(rank: int) -> None:
    settings = {"name": rank, "folder": rank} | ({"overflow": "drop"} if rank == 1 else {})
    for key, value in settings.items():  # parts
        log.append((key, value))
    if len(log) % 3 == 0:
        collective("drop")
    collective("end")


def batches_of(rank: int) -> Iterator[int]:
    for step in range(6):
        rows = 3 if (rank, step) == (1, 4) else 4  # sets
        yield rows * 2


def a_loader_yields_a_short_batch(rank: int) -> None:
    for size in batches_of(rank):
        collective(size)


LINES = {(1, 4): "a b"}


def lines_of(rank: int) -> Iterator[str]:
    for number in range(6):
        yield LINES.get((rank, number), "a b c")  # yields


def a_copy_of_a_file_has_a_shorter_line(rank: int) -> None:
    for line in lines_of(rank):
        collective(len(line))


def one_rank_logs_once_and_another_has_a_short_batch(rank: int) -> None:
    for step in range(6):
        if rank == 0 and step == 2:
            log.append(step)
        rows = 3 if (rank, step) == (1, 4) else 4  # sets
        collective(rows)


def lengths_differ_all_the_time(rank: int) -> None:
    """And are padded alike."""
    number = rank
    for step in range(8):
        length = (number * 3 + step * 5) % 7
        padded = max(length, 8)
        collective(padded)


def stage(_rank: int) -> None:
    """A stage of a pipeline, which in the sixth step does not pass on what it got."""
    for step in range(6):
        for part in range(2 + step % 2):
            received(step, part)
            if step == 5 and part:  # parts
                continue
            send(part)


def on_the_first_rank(rank: int, step: int) -> None:
    if rank != 0:  # parts
        return
    log.append(step)
    if step == 6:
        collective("a norm of sharded gradients")


def one_rank_logs_and_once_with_a_collective(rank: int) -> None:
    for step in range(8):
        collective(step)
        on_the_first_rank(rank, step)


def slow_stage(look: Callable[[], Any]) -> Any:
    """The same on its way to what it has yet to pass on, where it is looked at."""
    for step in range(6):
        for part in range(2 + step % 2):
            received(step, part)
            seen = look()
            send(part)
    return seen


def received(_step: int, _part: int) -> None:
    collective("receive")


def send(_part: int) -> None:
    collective("send")  # sends


@dataclass(frozen=True)
class Case:
    """A program, and what must be found of it."""

    program: Callable[[int], Any]
    odd: tuple[int, ...] = ()
    """With two ranks; empty where nobody can be blamed."""
    calls: tuple[str, ...] = field(default=())
    """Functions that the odd rank, or else rank 0, enters after the branch."""


BROKEN = (
    Case(scaler_skips_a_step, (1,)),
    Case(idle_rank_runs_a_dummy, (1,)),
    Case(decoding_ends_early, (1,)),
    Case(data_ends_early, ()),
    Case(a_bad_record_is_skipped, (1,)),
    Case(a_flag_is_set_long_before),  # the branch was passed too seldom for a past
    Case(one_rank_saves_with_a_collective),
    Case(data_ends_early_where_one_rank_logs, ()),
    Case(one_rank_attaches_a_hook),
)
HEALTHY = (rank_0_logs, rank_0_evaluates_now_and_then, experts_without_tokens, same_on_all)


def widths(*own: int) -> None:
    for width in own:
        collective(width)


def a_layer_more_in_the_last_step(rank: int) -> None:
    for step in range(4):
        for _ in range(3 + (rank == 1 and step == 3)):
            collective("layer")
        collective("loss")


def memory_runs_out_again_and_again(rank: int) -> None:
    """From the first step on one rank does a step in two halves, and the collectives are shifted more and more."""
    for step in range(6):
        retried(rank, step)


def retried(rank: int, step: int) -> None:
    try:
        reserved(rank, step)
    except MemoryError:
        for half in range(2):
            reserved(0, half)
    log.append(step)


def reserved(rank: int, step: int) -> None:
    make_room(rank, step)
    loss = step * 2
    gradient = loss + 1
    collective(gradient)


def make_room(rank: int, step: int) -> None:
    if rank == 1 and step % 2 == 0:  # parts
        raise MemoryError


def a_config_has_one_layer_more(rank: int) -> None:
    """It was read from a file that only one rank has, and each step has a collective more there."""
    folder = {"layers": 4} if rank == 1 else {}
    config = {"layers": 3}
    if folder:  # parts
        config.update(folder)
    model = stack_of(config["layers"])
    for step in range(3):
        for layer in model:
            collective(layer, step)
    log.append("done")


def stack_of(layers: int) -> list[int]:
    return [layer * 2 for layer in range(layers)]


def a_mode_is_passed(rank: int) -> None:
    modes = modes_of("fast" + ("er" if rank == 1 else ""))  # passes
    for step in range(3):
        collective(modes, step)


def modes_of(text: str) -> list[str]:
    return list(text)


def weights_without_gradients_are_skipped(rank: int) -> None:
    """And so two ranks sum different weights."""
    weights = [1.5, None, *([2.5] if rank == 0 else [None, 3.5])]
    for weight in weights:
        if weight is None:  # parts
            continue
        collective(weight)


def each_rank_has_its_place_in_a_mesh(rank: int) -> None:
    row, column = divmod(rank, 2)
    for step in range(3):
        collective(row, column, step)


def two_rings(rank: int) -> None:
    """From the third step on some ranks sum over their rows first, and others over their columns: all wait."""
    for step in range(4):
        groups = ["row", "column"]
        if step == 3 and rank in (1, 2):  # parts
            groups.reverse()
        for group in groups:
            collective(group)


def stages_of_a_pipeline(rank: int) -> None:
    """The last stage cuts its batch into parts of its own; that the first one receives nothing is its role."""
    most = 8
    if rank == 2:
        most = 6
    for rows in (12, 12, 16):
        parts = -(-rows // most)  # parts
        size = rows // parts
        for _ in range(min(parts, 2)):
            if rank != 0:
                collective("receive", size)
            collective("send", size)


def loops_that_end_one_after_the_other(rank: int) -> None:
    for epoch in range(2):
        for _ in range(3 + rank):
            collective("step", epoch)
    collective("end")


def an_order_is_made_anew(rank: int) -> None:
    names = ["head", "mlp", "embed", "logits"]
    for step in range(4):
        if step == 2:
            names = ordered(names, rank)
        all_of(names)


def ordered(names: list[str], rank: int) -> list[str]:
    times = {"head": 1, "mlp": 2, "embed": 3, "logits": 4}
    order = sorted(names, key=times.__getitem__, reverse=rank == 1)  # orders
    return order


def all_of(names: list[str]) -> None:
    for name in names:
        size = len(name)
        collective(size)


class Router:
    def __init__(self, factor: float) -> None:
        self.factor = factor * 2


def layers_read_a_setting(rank: int) -> None:
    """Each of them reads it anew."""
    routers = []
    for _ in range(3):
        factor = 1.25 if rank == 0 else 0.5  # factors
        routers.append(Router(factor))
    size = int(16 * routers[0].factor)
    collective(size)


def a_list_is_filled(rank: int) -> None:
    """By the room that is left, so that some items part the ranks."""
    room = 10 if rank == 0 else 7
    parts: list[list[int]] = [[]]
    for item in (4, 2, 3, 5, 1, 6, 2, 4, 3):
        if sum(parts[-1]) + item > room:  # parts
            parts.append([])
        parts[-1].append(item)
    for part in parts:
        collective(len(part))


def a_file_cannot_be_read(rank: int) -> None:
    state = read_once(rank)
    start = 0
    if state is not None:
        start = state()
    for step in range(start, 6):
        collective(step)


def read_once(rank: int) -> Callable[[], int] | None:
    try:
        return {0: lambda: 3}[rank]
    except KeyError:  # parts
        log.append(rank)
    return None


def each_rank_has_its_own_score(rank: int) -> None:
    """And the best one is kept with a collective, whoever has it."""
    best = 0.0
    for step in range(6):
        score = step + 1 + 0.25 * rank if step != 4 else 99.0 * (rank == 0)
        if score > best:  # parts
            best = score
            collective("best", step)
        collective("step", step)


def each_rank_has_rows_of_its_own(rank: int) -> None:
    """The last rank has one fewer."""
    each = 5
    begin = rank * each
    end = min(begin + each, 9)  # ends
    for step in range(3):
        rows = end - begin
        collective(rows, step)


WEIGHTS = ((1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 2, 2))
"""Of each rank, which no line of the program sets."""


def a_hook_is_given_a_weight(rank: int) -> None:
    """By code that is not the program's, as in a backward pass."""
    hooks = [hooked]
    for step in range(6):
        list(map(hooks[0], WEIGHTS[rank][step : step + 1]))


def hooked(weight: int) -> None:
    collective(weight)


class Settings:
    def __init__(self) -> None:
        self.slots = 8


def of_this_node(rank: int) -> Settings:
    settings = Settings()
    for name, value in {1: {"slots": 4}}.get(rank, {}).items():
        setattr(settings, name, value)  # by name
    return settings


def settings_are_those_of_a_node(rank: int) -> None:
    settings = of_this_node(rank)
    if rank == 0:
        log.append("begin")
    for step in range(3):
        collective(step, settings.slots)


def one_node_has_no_settings(rank: int) -> None:
    settings = Settings()
    if rank != 1:
        settings.slots = 4
    for step in range(3):
        collective(step, settings.slots)


class Weight:
    """A parameter, whose hooks torch runs."""

    def __init__(self, has_gradient: bool) -> None:
        self.has_gradient = has_gradient
        self.hooks: list[Callable[[int], None]] = []
        self.register = self.hooks.append


class Overlap:
    """Reduces a gradient as soon as it is there."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        for weight in weights:
            if weight.has_gradient:  # parts
                weight.register(self.launch)

    def launch(self, step: int) -> None:
        collective(step)


def a_hook_is_registered_on_some_ranks(rank: int) -> None:
    weights = [Weight(number > 0 or rank != 1) for number in range(3)]
    Overlap(weights)
    for step in range(3):
        if step == 0 and rank == 0:
            log.append(step)
        backward(weights, step)


registered = operator.attrgetter("hooks")


def backward(weights: Sequence[Weight], step: int) -> None:
    """Runs what it was given, whose names no line of it has."""
    for weight in weights:
        list(map(operator.call, registered(weight), repeat(step)))


class Best:
    def save(self, rank: int) -> None:
        collective("parts")
        if rank == 0:
            writer.save()

    def update(self, rank: int, step: int) -> None:
        if step == 1 or (step == 4 and rank == 1):  # parts
            self.save(rank)


class writer:
    @staticmethod
    def save() -> None:
        log.append("saved")


def one_rank_saves_what_is_best(rank: int) -> None:
    best = Best()
    for step in range(6):
        collective(step)
        best.update(rank, step)


def one_rank_logs_at_first(rank: int) -> None:
    if rank == 0:
        log.append("begin")
    for step in range(3):
        collective(step)


def a_busy_setup(rank: int) -> None:
    for number in range(3):
        log.append(number)
    for step in range(3):
        collective(step)
        log.append(step)


def of_one_bucket(weights: Sequence[int], room: int) -> Iterator[list[int]]:
    bucket: list[int] = []
    for weight in weights:
        if bucket and sum(bucket) + weight > room:  # parts
            yield bucket
            bucket = []
        bucket.append(weight)
    yield bucket


def buckets_are_of_another_size(rank: int) -> None:
    """The first one already; the room is not set by a line of the program."""
    for bucket in of_one_bucket((3, 4, 5), ROOMS[rank]):
        flat = tuple(bucket)
        collective(flat)


ROOMS = (7, 12)


FREE = (9, 9, 4)


def parts_that_fit(rank: int) -> int:
    return 4 if FREE[rank] > 8 else 2


def stages_with_parts_of_their_own(rank: int) -> None:
    """They die in the first message, before any of them has a past."""
    num_parts = parts_that_fit(rank)
    if rank == 0:
        collective("send", num_parts)
    else:
        collective("receive", num_parts)


LOGS = (True, False, False)


class Mode:
    def __init__(self) -> None:
        self.training = True


def a_mode_is_not_restored(rank: int) -> None:
    """Rank 1 has nothing to evaluate; what rank 0 alone does before is its role."""
    model = Mode()
    for step in range(6):
        collective(step, model.training)
        if step == 4:
            if LOGS[rank]:
                model.training = True
            evaluated(model, (3, 0, 2)[rank])


def evaluated(model: Mode, documents: int) -> None:
    model.training = False
    if not documents:  # parts
        return
    for document in range(documents):
        log.append(document)
    model.training = True


def costs_decide_about_the_order(rank: int) -> None:
    """Each rank has costs of its own, by which only rank 1 goes another way in the end."""
    for step in range(6):
        rows = 60 if rank == 1 and step > 4 else 8 - (rank == 2 and step == 2)  # sets
        collective(step, rows)


FUSED = (False, True, False)


class Adapter:
    def __init__(self, number: int) -> None:
        self.fused = FUSED[number]  # sets
        self.weight = 1.0
        if self.fused:
            self.weight += 1.0


def a_setting_changes_what_is_made(rank: int) -> None:
    adapter = Adapter(rank)
    for step in range(3):
        collective(step, adapter.fused, adapter.weight)


class Frozen:
    def __init__(self) -> None:
        self.hooks = [Optimizer.reduced]

    def thaw(self) -> None:
        self.hooks *= 2


class Unfreezing:
    def __init__(self, module: Frozen, at: int) -> None:
        self.module, self.at, self.is_frozen = module, at, True

    def step(self, step: int) -> None:
        if self.is_frozen and step >= self.at:  # parts
            self.module.thaw()
            self.is_frozen = False


def one_rank_unfreezes_too_early(rank: int) -> None:
    encoder = Frozen()
    schedule = Unfreezing(encoder, (5, 3)[rank == 1])
    for step in range(5):
        collective("forward", step)
        schedule.step(step)
        list(map(operator.call, registered(encoder), repeat(step)))


def a_request_comes_late(rank: int) -> None:
    """That the load balancer of a rank lost a packet is written as a branch; in a job it is none."""
    gaps = [0, 0, 0, 0]
    if rank == 1:
        gaps[2] = 9
    for step in range(4):
        if gaps[step] > 5:  # parts
            continue
        collective(step)


LEFT_OUT = ((), ("down",))


def a_plan_lacks_an_entry(rank: int) -> None:
    """By which the one line behind it does less on that rank."""
    plan: list[str] = []
    for name in ("up", "down", "gate"):
        if name in LEFT_OUT[rank]:  # parts
            continue
        plan.append(name)
    collective(plan)


def a_last_stage(_rank: int) -> None:
    """In the fifth step it has one part fewer than before."""
    for step in range(5):
        for part in range(3 - (step == 4)):  # parts
            received(step, part)
            send(part)
        collective("gradients")


def documents_are_filtered(rank: int) -> None:
    """What is in a batch is a rank's own all the time."""
    for step in range(6):
        batch = [f"{rank} {step} {row}" for row in range(4)]
        chosen = batch[: 3 if rank == 1 and step == 5 else 4]  # sets
        collective(chosen)


class Guard:
    is_requested = False

    def on_signal(self) -> None:
        self.is_requested = True


def a_signal_comes(rank: int) -> None:
    """While a line runs that has nothing to do with it."""
    guard = Guard()
    waiting = [lambda: None] * 12
    if rank == 1:
        waiting[5] = guard.on_signal
    for step in range(12):
        list(map(operator.call, waiting[step : step + 1]))
        collective(step)
        if guard.is_requested:  # parts
            break
    collective("end")


STATES = (0, 2, 0)


class Counted:
    def __init__(self) -> None:
        self.count = 0

    def load(self, number: int) -> None:
        self.count = STATES[number]

    def is_last(self) -> bool:
        return (self.count + 1) % 4 == 0


def a_count_is_resumed(rank: int) -> None:
    counted = Counted()
    counted.load(rank)
    for step in range(2):
        last = counted.is_last()
        collective(step, last)
        counted.count += 1


PARTS = (3, 3, 4)


def the_last_stage_expects_more(rank: int) -> None:
    """That stages receive, or send, is their role."""
    num_parts = PARTS[rank]
    for part in range(num_parts):  # parts
        if rank != 0:
            collective("receive", part)
        if rank != 2:
            collective("send", part)
    collective("end")


def a_stage_logs_once(_rank: int) -> None:
    """In the fifth step, behind its last part."""
    for step in range(5):
        for part in range(3):
            received(step, part)
            send(part)
        if step == 4:
            log.append(step)
        collective("gradients")


def a_stage_logs_between_two_parts(_rank: int) -> None:
    """Once, and then it sends as before."""
    for step in range(5):
        for part in range(3):
            if (step, part) == (4, 1):
                log.append(step)
            send(part)


READINGS = ({"cpu": 3}, {"watts": 3}, {"cpu": 3})


def a_reading_lacks_a_key(rank: int) -> None:
    """In a line that has no choice, behind a branch that has nothing to do with it."""
    for step in range(3):
        collective("step", step)
        if step == 1 and LOGS[rank]:
            log.append(step)
        if step == 2:
            reported(READINGS[rank])


def reported(reading: dict[str, int]) -> None:
    try:
        value = reading["cpu"]
        collective("power", value)
    except KeyError:  # parts
        log.append("no value")


def a_hook_is_registered_on_the_first_rank(rank: int) -> None:
    """What that rank alone does next is no reason."""
    weights = [Weight(False)]
    overlap = Overlap(weights)
    if rank == 0:  # parts
        weights[0].register(overlap.launch)
    if LOGS[rank]:
        log.append("registered")
    for step in range(3):
        collective("step", step)
        backward(weights, step)


def time_is_over(rank: int) -> None:
    """Each rank looks at a clock of its own."""
    for step in range(9):
        collective(step)
        is_over = step == (6 if rank == 1 else 8)
        if is_over:  # parts
            break
    collective("end")


def each_rank_has_a_folder_of_its_own(rank: int) -> None:
    folder = ("tmp-x2", "tmp-9f", "tmp-k0")[rank]
    words = (40, 40, 41)[rank]  # sets
    rows = len(folder) + words
    for _ in range(4):
        collective(rows)


def each_rank_has_a_length_of_its_own(rank: int) -> None:
    rows = (40, 44, 52)[rank]  # sets
    for _ in range(4):
        collective(rows)


OLD = (False, False, False, True)
"""Of each rank, whether it is told where it was before."""
racks: list[str] = []


def look_up(epoch: int, is_old: bool) -> None:
    if epoch > 0 and is_old:  # parts
        racks.append("rack 0")
        return
    racks.append("rack 1")


def width_of(layer: int) -> int:
    return 8 * layer


def trained(rank: int, step: int) -> float:
    collective("step", step)
    return float(rank % 2)


def one_rank_is_told_an_old_place(rank: int) -> None:
    """All issue the same; a group that they do not know of comes of it. Rank 0 logs once."""
    widths = [width_of(1), width_of(2)]
    widths += [width_of(3), width_of(4)]
    for step in range(6):
        if step % 3 == 0:
            look_up(step // 3, OLD[rank])
        loss = trained(rank, step)
        if rank == 0 and step < 1:
            log.append((loss, widths))


def scored(number: int) -> int:
    if number == 2:  # parts
        raise ValueError("a bad label")
    return number


def the_first_rank_scores(rank: int) -> None:
    """What it compiles afterwards is another thing: it has not put back what it changed."""
    for step in range(8):
        collective("step", step)
        if rank == 0 and step % 2 == 0:
            try:
                log.append(scored(step // 2))
            except ValueError:
                log.append("no score")


REQUESTS = ["a"], ["b"], ["c"], ["d"], ["e", "g"]
LENGTHS = {"a": 8, "b": 8, "c": 8, "d": 8, "e": 8, "g": 16}


class Waiting:
    """Requests in an order of its own, as the hashes of texts give it; of one there is no other order."""

    def __init__(self, rank: int) -> None:
        self.steps = [names[:: -1 if rank else 1] for names in REQUESTS]

    def batch(self, step: int) -> list[str]:
        batch = []
        for name in self.steps[step]:  # orders
            batch.append(name)
        return batch


def a_burst_is_ordered_on_each_rank(rank: int) -> None:
    waiting = Waiting(rank)
    for step in range(5):
        batch = waiting.batch(step)
        collective(LENGTHS[batch[0]])


def a_round_is_restored(rank: int) -> None:
    """All issue the same, one of them with the partner of an earlier round."""
    rounds = 0
    for step in range(5):
        if rank == 2 and step == 4:  # parts
            rounds = 0
        collective("exchange", rank ^ (1 + rounds % 3))
        rounds += 1


def items(count: int) -> Iterator[int]:
    for number in range(count):
        yield number + 1


def a_bank_is_smaller(rank: int) -> None:
    """`zip` takes an item, sees that the bank is empty, and drops it: one rank has fewer steps in the end."""
    stream, taken = items(12), 1
    while taken:
        taken = 0
        for _ in zip(stream, range(6 if rank == 1 else 16), strict=False):  # parts
            collective("step")
            taken += 2
    collective("summary")


def taken(words: str) -> int:
    return int(words)  # parts


def commanded(rank: int) -> None:
    for step in range(9):
        collective("loss")
        try:
            log.append(taken("" if rank == 1 and step == 6 else "1"))
        except KeyError:
            log.append(step)
        collective("update", step)


def a_handler_does_not_catch(rank: int) -> None:
    """What one rank raises passes the `except`, and the rank leaves."""
    with suppress(ValueError):
        commanded(rank)


def factor(rank: int) -> float:
    return 1.0 if rank == 1 else 0.25  # agrees


def a_buffer_is_stretched(rank: int) -> None:
    """What the compiled region then computes with is nowhere to be seen, and rank 0 alone prints.

    That one rank has fewer rows did no harm for four steps.
    """
    rows = [0] * (36 if rank == 1 else 48)
    log.append(len(rows))
    for step in range(6):
        if step == 4:
            log.append(factor(rank))
        collective("hidden", step)
        if step == 4:
            return
        if rank == 0:
            log.append(step)


def a_shard_is_shorter(rank: int) -> None:
    """The steps are agreed, and the same on all; the first thing that was different is the number of rows."""
    rows = [0] * (36 if rank == 1 else 48)  # agrees
    labels = rows[:]
    log.append(len(labels))
    for step in range(6):
        collective("weights", step)


class Greedy:
    @staticmethod
    def act() -> None:
        collective("act")


class Sampling:
    @staticmethod
    def act() -> None:
        collective("act")
        collective("noise")


class Agent:
    kinds: ClassVar[dict[str, type]] = {"greedy": Greedy, "sample": Sampling}

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.policy = Greedy()

    def refresh(self, kind: str) -> None:
        self.policy = self.kinds[kind]()


def a_policy_is_chosen(rank: int) -> None:
    """What the ranks call is a method of an object, whose class says where they parted."""
    agent = Agent(rank)
    for step in range(7):
        collective("loss")
        agent.refresh("sample" if rank == 1 and step == 6 else "greedy")  # sets
        agent.policy.act()


def items_are_appended(rank: int) -> None:
    """All append as many, of which one differs, once."""
    for step in range(7):
        batch: list[int] = []
        for at in range(3):
            batch.append(4 + at + 8 * (rank == 1 and step == 6))  # sets
        collective("rows", sum(batch))


PENDING: list[int] = []


def a_list_of_the_module_grows(rank: int) -> None:
    PENDING.clear()
    for step in range(7):
        note(step, rank)
        collective("rows", sum(PENDING))


def note(step: int, rank: int) -> None:
    PENDING.append(4 + 3 * (rank == 1 and step == 6))  # sets
