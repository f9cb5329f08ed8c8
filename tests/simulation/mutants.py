"""Faults of one line each in `gcserver/core`, every one of which some test must notice.

What may live here: the table, and how a line is replaced. What may not: running tests (`mutate.py`), faults that take
more than a line (`planted.py`).

A fault names the file, the line as it is now (without indentation) and the line in its place. A line that is not there
exactly once makes the fault stale, which is an error: whoever changes such a line says what now breaks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CORE = Path(__file__).parents[2] / "gcserver" / "core"


class Stale(ValueError):
    """A fault whose line is not in its file exactly once."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault. ``file`` in `gcserver/core`; ``breaks`` what is then wrong; ``faults`` kinds of fault of the simulated
    world that bring it out (none: any mix)."""

    file: str
    old: str
    new: str
    breaks: str
    faults: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Its file and a word that tells it from others."""
        return f"{self.file.removesuffix('.py')}: {self.breaks}"

    def source(self) -> str:
        """The file with the fault in it. Raises :class:`Stale`."""
        lines = (CORE / self.file).read_text().splitlines()
        found = [i for i, line in enumerate(lines) if line.strip() == self.old]
        if len(found) != 1:
            raise Stale(f"{self.file} has {len(found)} lines {self.old!r}, expected one ({self.breaks})")
        indentation = lines[found[0]][: len(lines[found[0]]) - len(lines[found[0]].lstrip())]
        lines[found[0]] = indentation + self.new
        return "\n".join(lines) + "\n"


CRASHES = ("crash_lane", "crash_node")
LOSSES = ("lose", "reset", "crash_lane")

# fmt: off
MUTANTS: tuple[Mutant, ...] = (
    # ------------------------------------------------------------------------------- rounds and their end
    Mutant("completion.py", "p.out_step, p.out_nonfinite, p.out_proposal = r.step, nonfinite, r.proposal",
           "p.out_nonfinite, p.out_proposal = nonfinite, r.proposal", "a complete round is not known as complete"),
    Mutant("completion.py", "step.nonfinite |= nonfinite", "pass", "a step with a NaN settles as good"),
    Mutant("completion.py", "if step.finished or not step.is_closed or len(step.done) < len(step.expected):",
           "if step.finished or not step.is_closed:", "a step is finished before its blocks are"),
    Mutant("completion.py", "new = replace(versions, current=1 - versions.current, settled=step)",
           "new = replace(versions, settled=step)", "new residuals never become current"),
    Mutant("completion.py", "p.unsettled = r.step", "pass", "nobody waits for residuals to settle"),
    Mutant("exchange.py", "if x.have >> member & 1:", "if False:", "what comes twice is taken twice", LOSSES),
    Mutant("exchange.py", "x.have |= 1 << member", "pass", "nobody remembers who has contributed", LOSSES),
    Mutant("exchange.py", "del x.parked[member]", "pass", "what waits of an earlier life is kept beside the next one's",
           ("crash_lane", "crash_node", "crash_supervisor")),
    Mutant("exchange.py", "x.have &= ~(1 << member)", "pass", "what was dropped of an earlier life counts as there",
           ("crash_lane", "crash_node", "crash_supervisor")),
    Mutant("exchange.py", "x.grade = max(x.grade, parked.level)", "x.grade = parked.level",
           "the sum has the level of the last contributor", ("tune", "set_codec")),
    Mutant("exchange.py", "if codec is not None and codec.level != x.grade:", "if False:",
           "an owner encodes at its own level only", ("tune", "set_codec")),
    Mutant("exchange.py", "x.nonfinite |= parked.nonfinite", "x.nonfinite = parked.nonfinite",
           "only the last member's NaN counts"),
    Mutant("exchange.py", "divisor = d.config.divisor if (r.flags or 0) & Flag.AVERAGE else 1",
           "divisor = d.config.divisor", "sums are divided too"),
    Mutant("exchange.py", "if h.step <= p.out_step or (under_way is not None and under_way.exchange(stage).over):",
           "if h.step < p.out_step or (under_way is not None and under_way.exchange(stage).over):",
           "a late contribution opens the newest round again", LOSSES),
    Mutant("exchange.py", "d.outward.take(members[member].node, parked.nbytes, parked.life)", "pass",
           "credit of what was summed never goes back"),
    Mutant("exchange.py", 'seed = wire.digest(seed.to_bytes(8, "little") + b"owner")', "pass",
           "an owner draws the random numbers of its own contribution again"),
    Mutant("rounds.py", "used = {r.slot for r in self.retained}", "used: set[int] = set()",
           "what is retained is overwritten", CRASHES),
    Mutant("rounds.py", "out_step=memory.out_step,", "out_step=0,", "a restarted lane begins anew", CRASHES),
    # --------------------------------------------------------------------------------- decisions, residuals
    Mutant("encoding.py", "if (codec.feedback or (codec.drains and p.held)) and p.unsettled > d.steps.settled:",
           "if False:", "residuals of a step that is not settled are read"),
    Mutant("encoding.py", "if decision is None or decision.step != r.step:", "if True:",
           "a retry decides anew", ("set_codec", "crash_lane", "tune")),
    Mutant("encoding.py", "p.residual = p.residual.writing(r.step, zeros=not codec.feedback)", "pass",
           "what is written to a residual is not known as written"),
    Mutant("encoding.py", "node = 0 if codec.shared_seed else c.members[c.me].node", "node = 0",
           "all nodes draw the same random numbers"),
    Mutant("encoding.py", 'origin = c.job if c.seed is None else c.seed.to_bytes(8, "little")', "origin = c.job",
           "a job's seed does not make it repeatable"),
    Mutant("encoding.py", "p.retained = p.retained[1:]", "pass",
           "a payload made again is released twice", ("crash_lane", "lose", "reset")),
    Mutant("failed_jobs.py", "return failure.told if failure is not None and node in failure.others else None",
           "return None", "whoever speaks of a job that failed and is forgotten hears nothing",
           ("crash_worker", "dead_node")),
    Mutant("failed_jobs.py", "return (failure.told for failure in self.values() if node in failure.others)",
           "return iter(())", "who comes up does not hear of jobs that failed", ("crash_worker", "dead_node")),
    Mutant("opening.py", "d.out.extend(completion.report_of(d, record) for record in d.finished.values())", "pass",
           "a restarted lane does not report what it finished", ("crash_node", "crash_lane", "crash_supervisor")),
    Mutant("opening.py", "here = (r for r in finished if r.epoch == d.config.epoch and r.step > d.steps.settled)",
           "here = (r for r in finished if r.epoch == d.config.epoch)",
           "a restarted lane begins behind what is settled", CRASHES),
    Mutant("opening.py", "p.unsettled = max(p.unsettled, versions.written)", "pass",
           "a restarted lane does not wait for residuals to settle", CRASHES),
    Mutant("opening.py", "completion.flip(d, p, versions.written, owner)", "pass",
           "residuals settled while a lane was away stay the old ones", CRASHES),
    Mutant("opening.py", "if p.out_step > d.steps.settled and p.out_step not in d.finished:", "if False:",
           "a step whose void only the output tells of is overtaken", CRASHES),
    Mutant("tuning.py", "return -1, min(max(level, low), high)", "return -1, level",
           "a controller asks for levels that the codec has not"),
    Mutant("plan.py", "return plan.rules[last] if last >= 0 else None", "return plan.rules[0] if last >= 0 else None",
           "the first rule that matches wins", ("set_codec",)),
    # ------------------------------------------------------------------------------------- pushes and steps
    Mutant("pushes.py", "if r.local.bit_count() == d.config.local_ranks:", "if r.local:",
           "a round does not wait for all local ranks"),
    Mutant("pushes.py", "step.done.add(key)", "pass", "what was complete before a restart is waited for", CRASHES),
    Mutant("pushes.py", "step.nonfinite |= p.out_nonfinite", "pass",
           "a restart forgets that a step is void", CRASHES),
    Mutant("pushes.py", "odd = min(d.remote.pop(step.number, set()) - step.expected, default=None)", "odd = None",
           "a tensor that only others push is not noticed"),
    Mutant("steps.py", "if self.plan_version(number + self.lag) != plan:", "if False:",
           "a new plan is never in force", ("set_codec",)),
    Mutant("steps.py", "return number <= self.settled + self.lag", "return number <= self.settled + self.lag + 1",
           "a step runs before its plan is fixed", ("set_codec", "pause_supervisor")),
    Mutant("steps.py", "self.voids.add(number)", "pass", "a void step's residuals become current"),
    Mutant("settling.py", "void = any(r.nonfinite for r in reports)", "void = all(r.nonfinite for r in reports)",
           "a NaN on one lane only does not void the step"),
    # ------------------------------------------------------------------------------------------------ links
    Mutant("accounts.py", "account.returned = min(total, account.spent)", "account.returned = total",
           "a peer may return more credit than was spent"),
    Mutant("accounts.py", "if account is not None and total > account.returned:", "if account is not None:",
           "an old frame takes returned credit away", ("replay", "lose", "reset")),
    Mutant("link.py", "return out + nbytes <= (self.credit if first else half) or (first and out <= half)",
           "return out + nbytes <= (self.credit if first else half)",
           "a payload larger than the credit waits for ever"),
    Mutant("link.py", "if not self.arrivals.impatient(now):", "if not (self.up and self.arrivals.impatient(now)):",
           "a first connection on which nothing arrives is never made anew"),
    Mutant("link.py", "self.next_seq, self.acked = 1, 0", "self.acked = 0",
           "numbers do not start over with a peer's new life", CRASHES),
    Mutant("link.py", "self.unacked.clear()", "pass", "a peer's new life is sent frames of the old", CRASHES),
    Mutant("link.py", "if seq <= self.received or seq in self.ahead:", "if seq <= self.received:",
           "a frame that came early counts twice", ("lose", "replay", "reset")),
    Mutant("link.py", "lost = instead_of.payload_bytes if instead_of.phase is CONTRIBUTION else 0", "lost = 0",
           "credit of a lost frame that nobody wants is lost", LOSSES),
    Mutant("link.py", "self.highest = max(self.highest, min(beat.highest, self.highest + MAX_AHEAD))", "pass",
           "the last frame of all can be lost", ("lose", "reset")),
    Mutant("link.py", "return self.damaged[seq] >= 2", "return self.damaged[seq] >= 1",
           "one damaged frame ends a job", ("corrupt",)),
    Mutant("link.py", "if h.incarnation > self.theirs or h.to_incarnation != self.incarnation:",
           "if h.incarnation > self.theirs:", "frames for an earlier life are taken", CRASHES),
    Mutant("link.py", "account.spent += header.payload_bytes", "pass",
           "contributions cost no credit"),
    # ----------------------------------------------------------------------------------- frames and queues
    Mutant("frames.py", "return header, kept.handle, lambda: not d.faulted and kept in p.retained",
           "return header, kept.handle, lambda: not d.faulted", "an aggregate that is gone is sent again", LOSSES),
    Mutant("frames.py", "return header, own.handle, lambda: not d.faulted and "
           "not mine.complete and mine.stage == stage",
           "return header, own.handle, lambda: not d.faulted", "a contribution that is gone is sent again", LOSSES),
    Mutant("frames.py", "if all(m.node != peer for m in d.config.members):", "if False:",
           "contributions go to nodes outside the domain", CRASHES),
    Mutant("outbox.py", "heapq.heappush(self.heaps.setdefault(domain, []), (step, -key))",
           "heapq.heappush(self.heaps.setdefault(domain, []), (step, key))", "what backward needs last leaves first"),
    Mutant("early.py", "out.extend(frame for at, frame in frames if now - at >= after)", "pass",
           "frames for domains that never open are lost track of"),
    Mutant("early.py", "if domain is not None and (domain.early(frame.header) or domain.far(frame.header)):",
           "if False:", "steps far ahead are begun when their domain opens"),
    Mutant("lane.py", "if h.job in self.ended or (domain is not None and domain.faulted):",
           "if domain is not None and domain.faulted:", "late frames of a job that is over are kept"),
    Mutant("lane.py", "if member is None or h.epoch != domain.config.epoch:", "if member is None:",
           "frames of another epoch are taken", ("old_epoch",)),
    Mutant("lane.py", "if link is not None and link.theirs == life and domain[0] not in self.ended:",
           "if link is not None and domain[0] not in self.ended:", "credit goes to a life that never spent it",
           ("crash_lane", "crash_node", "crash_supervisor")),
    Mutant("lane.py", "if not link.may_spend(key, header.payload_bytes, step <= domain.front):",
           "if False:", "credit is not looked at"),
    Mutant("link.py", "out, half = self.outstanding(domain), self.credit // 2",
           "out, half = self.outstanding(domain), self.credit", "later steps hold the credit that the first one needs"),
    Mutant("lane.py", "link.forget(e.domain)", "pass", "books of closed domains are kept"),
    Mutant("lane.py", "self.out.extend(opening.close(domain))", "opening.close(domain)",
           "payloads of a closed domain are not released"),
    # ------------------------------------------------------------------------------------ the control machine
    Mutant("job.py", "return not self.workers and "
           "(self.ended is not None or len(self.left) == len(self.record.members))",
           "return not self.workers", "a member forgets the job while others need its payloads", ("lose", "pause")),
    Mutant("waiting.py", "if waited > job.record.deadline:", "if False:", "there is no deadline"),
    Mutant("waiting.py", "if (age := ages.get(name, 0.0)) > lease:", "if False:", "no lease ever expires"),
    Mutant("waiting.py", "if out := _silent(job, domain, what, report.missing, ages, patience):", "if False:",
           "a job that outlives nodes ends at a step's deadline, a moment before a dead node's lease does"),
    Mutant("job.py", "self.change = Change(dict(memory.lost), memory.frozen or bool(memory.lost))",
           "self.change = Change(frozen=memory.frozen)", "whom a node lost is forgotten by a restart"),
    Mutant("declarations.py", "if different or index < len(domain.sections) or "
           "len(offers) < len(domain.config.members) - 1:", "if different or index < len(domain.sections):",
           "tensors are agreed before all members have declared them"),
    Mutant("gathering.py", "if join.nonce <= self.used.get((join.label, node), 0) or not join.member.ranks:",
           "if not join.member.ranks:", "a join is used twice"),
    Mutant("job_plans.py", "if waiting:", "if False:", "a plan is proposed before all members know it", ("set_codec",)),
    Mutant("job_plans.py", "job.proposal = go.version", "pass", "what all know is never proposed", ("set_codec",)),
    Mutant("plan_requests.py", "for version in sorted(v for v in self.asked if 0 < v <= plan):",
           "for version in sorted(v for v in self.asked if v == plan):",
           "who asked for an earlier plan is never answered"),
    Mutant("control.py", "job.worker_back(m.rank, connection)", "pass",
           "a worker that came back is thought to be away", ("crash_supervisor", "crash_node")),
    Mutant("peers.py", "lost = self.generations.get(link.name, hello.generation) != hello.generation", "lost = False",
           "a peer that lost its memory is not noticed"),
)
# fmt: on
