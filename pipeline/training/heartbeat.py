"""What ranks tell each other all the time, and what they conclude from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.training import phases


@dataclass(frozen=True)
class Beat:
    """A rank's sign of life.

    Attributes:
        number: counts up.
        step: optimiser step at hand.
        phase: what is done in it (``phases``).
        count: counts the moments of the run (``phases.Moment``).
        place: line of the program at which the main thread is.
        words: why the rank ends, in its own words; empty while it goes on.
    """

    number: int = 0
    step: int = 0
    phase: str = phases.START
    count: int = 0
    place: str = ""
    words: str = ""

    @property
    def where(self) -> str:
        """Step and phase in words."""
        if not self.step:
            return "before the first step"
        return f"at step {self.step}, {self.phase if self.phase == phases.BETWEEN else f'in {self.phase}'}"


@dataclass(frozen=True)
class Verdict:
    """Which rank has failed, and how.

    Attributes:
        rank: the rank; -1 where none can be told from the others.
        text: one sentence.
        silent: the rank does not answer, and would not end by itself.
    """

    rank: int
    text: str
    silent: bool = False


class Judge:
    """Looks at the beats of ranks.

    Args:
        ranks: those that are looked at.
        own: rank that looks.
        silence: seconds without a beat after which a rank is taken for lost.
        hang: seconds without progress of a rank after which the run is taken for hanging.
        now: seconds of the monotonic clock.
    """

    def __init__(self, ranks: list[int], own: int, silence: float, hang: float, now: float) -> None:
        self._own, self._silence, self._hang = own, silence, hang
        self._beats = dict.fromkeys(ranks, Beat())
        self._beaten = dict.fromkeys(ranks, now)
        self._moved = dict.fromkeys(ranks, now)

    def forgive(self, seconds: float) -> None:
        """Leave out a time in which this process itself stood still."""
        for times in (self._beaten, self._moved):
            for rank in times:
                times[rank] += seconds

    def hear(self, rank: int, beat: Beat, now: float) -> None:
        """Take in a beat that has come now."""
        last = self._beats.get(rank)
        if last is None:
            return
        self._beaten[rank] = now
        if beat.count != last.count:
            self._moved[rank] = now
        self._beats[rank] = beat

    def place(self, rank: int, step: int, phase: str) -> None:
        """Correct where a rank is, without a beat of it."""
        self._beats[rank] = replace(self._beats[rank], step=step, phase=phase)

    def look(self, now: float, ends: Mapping[int, str], states: Mapping[int, str]) -> Verdict | None:
        """Return what has happened; None while all is well.

        Args:
            now: seconds of the monotonic clock.
            ends: how the ranks have ended whose processes are known to have.
            states: what is known of the processes of others.
        """
        return self._failed() or self._ended(ends) or self._silent(now, states) or self._hanging(now)

    def _failed(self) -> Verdict | None:
        for rank, beat in self._beats.items():
            if beat.words:
                return Verdict(rank, f"rank {rank} failed {beat.where}: {beat.words}")
        return None

    def _ended(self, ends: Mapping[int, str]) -> Verdict | None:
        for rank, how in ends.items():
            if rank in self._beats:
                return Verdict(rank, f"rank {rank} {how} {self._beats[rank].where}")
        return None

    def _silent(self, now: float, states: Mapping[int, str]) -> Verdict | None:
        for rank, beat in self._beats.items():
            quiet = now - self._beaten[rank]
            if rank == self._own or quiet <= self._silence:
                continue
            state = f"; {states[rank]}" if rank in states else ""
            return Verdict(rank, f"rank {rank} has been silent for {quiet:.0f} s {beat.where}{state}", silent=True)
        return None

    def _hanging(self, now: float) -> Verdict | None:
        still = {rank: now - moved for rank, moved in self._moved.items()}
        if max(still.values()) <= self._hang:
            return None
        least = min(beat.count for beat in self._beats.values())
        behind = [rank for rank, beat in self._beats.items() if beat.count == least]
        rank, seconds = behind[0], min(still[each] for each in behind)
        beat = self._beats[rank]
        if len(behind) == 1:
            at = f" ({beat.place})" if beat.place else ""
            return Verdict(rank, f"rank {rank} has made no progress for {seconds:.0f} s {beat.where}{at}")
        places = "; ".join(f"rank {each} at {self._beats[each].place or 'no known place'}" for each in behind[:4])
        more = f"; and {len(behind) - 4} more" if len(behind) > 4 else ""
        return Verdict(-1, f"no rank has made progress for {seconds:.0f} s {beat.where} ({places}{more})")
