"""Compile of this rank -> a finding for each custom op or Triton kernel in it that may not run on a shard, once."""

from __future__ import annotations

from collections.abc import Callable, Collection

from tpcompile.errors import ExitCode, TpCompileError
from tpcompile.evidence.judgement import leading
from tpcompile.evidence.judgement.checks import how_used, refused_check
from tpcompile.evidence.records import CompileRecord, Item, Status, Verdict
from tpcompile.recording import CaptureSession
from tpcompile.sentinel.sink import logger
from tpcompile.sentinel.store_log import StoreLog


class RefusedKernels:
    """Reports what the ban of `tpcompile.fastpath` refuses in a running job; the job goes on."""

    def __init__(
        self,
        log: StoreLog,
        session: CaptureSession,
        *,
        world_size: int,
        tp_size: int,
        tp_aware: Collection[str],
        report: Callable[[Verdict], None],
    ) -> None:
        self._log, self._session, self._report = log, session, report
        self._world_size, self._tp_size, self._tp_aware = world_size, tp_size, frozenset(tp_aware)
        self._known: set[str] = set()

    def on_compile(self, compile_: CompileRecord) -> None:
        """Judge a compile that has ended, before its code runs; a broken certificate must not break the compile."""
        if self._tp_size == 1:
            return
        try:
            judged = self._session.judged([compile_], tp_size=self._tp_size, tp_aware=self._tp_aware)
        except TpCompileError as error:
            logger.warning("custom ops, kernels, passes and backends were not judged: {}", error)
            return
        for item in judged.refused:
            if item.about not in self._known:
                self._known.add(item.about)
                self._tell(item)

    def _tell(self, item: Item) -> None:
        """Add a finding on this rank; the first rank of the domain that has it writes the warning."""
        check = refused_check("", {self._log.rank: [item]}, statuses=[(item.about, f"refused: {item.notes['why']}")])
        lead = leading.of_check(check)
        self._report(
            Verdict(
                status=Status.FAIL,
                exit_code=ExitCode.FAIL,
                world_size=self._world_size,
                preset="running program",
                summary=leading.summary(lead),
                lead=lead,
                checks=(check,),
            )
        )
        if self._log.claim(f"refused/{item.about}"):
            logger.warning(
                "{} may not run on a shard: {}; it is defined at {} and {}; the job goes on",
                item.about, item.notes["why"], item.notes["defined"], how_used(item),
            )  # fmt: skip
