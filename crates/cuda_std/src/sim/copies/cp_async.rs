//! `cp.async`.

use super::*;

/// `cp.async` of `bytes` bytes, of which `source_bytes` come from global memory and the rest are zeros.
#[track_caller]
pub(crate) fn cp_async(shared: u32, global: *const u8, bytes: u32, source_bytes: u32) {
    const INSTRUCTION: &str = "cp.async";
    let line = Location::caller();
    attempt(INSTRUCTION, line, |machine| {
        machine.needs(Need::CpAsync, INSTRUCTION)?;
        if source_bytes > bytes {
            let text = format!("`{INSTRUCTION}` of {bytes} bytes with {source_bytes} source bytes");
            return Err(Failure(Defect::Unsupported, text));
        }
        if !global.addr().is_multiple_of(bytes as usize) {
            return Err(machine.misaligned(Space::Global(global.addr()), bytes as usize, Kind::Read));
        }
        let (agent, time) = machine.cp_async_agent();
        let stamp = Some(Stamp::new(machine.unit().id, agent, time));
        let (bytes, source_bytes) = (bytes as usize, source_bytes as usize);
        let to = machine.access(Space::OwnShared(shared), bytes, bytes, Kind::Write, stamp, line)?;
        let fill = Move {
            from: Source::Fill([0; 16]),
            to: to.wrapping_add(source_bytes),
            bytes: bytes - source_bytes,
        };
        let copy = match source_bytes {
            0 => None,
            _ => {
                let from =
                    machine.access(Space::Global(global.addr()), source_bytes, 1, Kind::Read, stamp, line)?;
                Some(Move { from: Source::Memory(from), to, bytes: source_bytes })
            }
        };
        let now = match machine.moment {
            Moment::Soon => true,
            Moment::Late => false,
            Moment::Any => machine.random.one_in(2),
        };
        let under_way = &mut machine.thread().copies.under_way;
        for part in [Some(fill).filter(|fill| fill.bytes > 0), copy].into_iter().flatten() {
            if now {
                part.run();
            } else {
                under_way.push_back((time, part));
            }
        }
        Ok(())
    });
}

/// `cp.async.commit_group`.
#[track_caller]
pub(crate) fn cp_async_commit_group() {
    const INSTRUCTION: &str = "cp.async.commit_group";
    attempt(INSTRUCTION, Location::caller(), |machine| {
        machine.needs(Need::CpAsync, INSTRUCTION)?;
        let (agent, time) = machine.cp_async_agent();
        let copies = &mut machine.thread().copies;
        copies.groups.push(time);
        copies.agent = Some((agent, time + 1));
        Ok(())
    });
}

/// `cp.async.wait_group`.
#[track_caller]
pub(crate) fn cp_async_wait_group(newest: u32) {
    const INSTRUCTION: &str = "cp.async.wait_group";
    attempt(INSTRUCTION, Location::caller(), |machine| {
        machine.needs(Need::CpAsync, INSTRUCTION)?;
        let groups = &mut machine.thread().copies.groups;
        if let Some(done) = groups.len().checked_sub(newest as usize).filter(|&done| done > 0) {
            let time = groups[done - 1];
            groups.drain(..done);
            machine.finish_copies(time);
        }
        Ok(())
    });
}

/// `cp.async.wait_all`.
#[track_caller]
pub(crate) fn cp_async_wait_all() {
    const INSTRUCTION: &str = "cp.async.wait_all";
    attempt(INSTRUCTION, Location::caller(), |machine| {
        machine.needs(Need::CpAsync, INSTRUCTION)?;
        let (agent, time) = machine.cp_async_agent();
        let copies = &mut machine.thread().copies;
        copies.groups.clear();
        copies.agent = Some((agent, time + 1));
        machine.finish_copies(time);
        Ok(())
    });
}

/// `cp.async.mbarrier.arrive.noinc`.
#[track_caller]
pub(crate) fn cp_async_mbarrier_arrive_noinc(barrier: u32) {
    const INSTRUCTION: &str = "cp.async.mbarrier.arrive.noinc";
    let line = Location::caller();
    attempt(INSTRUCTION, line, |machine| {
        machine.needs(Need::CpAsync, INSTRUCTION)?;
        let place = machine.find_mbarrier(INSTRUCTION, barrier)?;
        let (agent, time) = machine.cp_async_agent();
        machine.thread().copies.agent = Some((agent, time + 1));
        let ThreadId { slot, thread } = machine.current;
        machine.start(Pending::Arrival { slot, thread, time, place, line })
    });
}
